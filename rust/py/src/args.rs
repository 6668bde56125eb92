//! What Python hands over: sizes, token ids, keys, arrays.

use kvalloc_core::{sequence::MAX_TOKENS, word::PageRef};
use pyo3::{
    buffer::{Element, PyBuffer},
    prelude::*,
    sync::PyOnceLock,
    types::{PyBool, PyByteArray, PyBytes, PyInt, PyList, PyString, PyTuple},
};

use crate::errors::InvalidArgument;

/// A size in bytes: an int, or text like "12GiB".
pub(crate) fn bytes(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    static PARSE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    PARSE.import(value.py(), "kvalloc.sizes", "parse_bytes")?.call1((value,))?.extract()
}

/// A whole number in a range; a bool is none.
pub(crate) fn number(value: &Bound<'_, PyAny>, name: &str, least: u64, most: u64) -> PyResult<u64> {
    match integer(value) {
        Some(n) if n >= i128::from(least) && n <= i128::from(most) => Ok(n as u64),
        _ => Err(InvalidArgument::new_err(format!(
            "{name} is {}; it must be a whole number from {least} to {most}",
            shown(value)
        ))),
    }
}

/// Functions that read one argument each, so that an error can name it: name, type, least and most.
macro_rules! numbers {
    ($($name:ident: $int:ident, $least:expr, $most:expr;)+) => {$(
        pub(crate) fn $name(value: &Bound<'_, PyAny>) -> PyResult<$int> {
            Ok(number(value, stringify!($name), $least, $most as u64)? as $int)
        }
    )+};
}

numbers! {
    group: u8, 0, u8::MAX;
    max_tenants: u32, 1, u32::MAX;
    events: u32, 0, u32::MAX;
    max_new_tokens: u32, 0, u32::MAX;
    adapter_generation: u64, 0, u64::MAX;
    priority: u8, 0, 100;
    tokens_to_pin: u32, 0, u32::MAX;
    max: usize, 0, usize::MAX;
}

/// Whether this is one number and not an array of one.
pub(crate) fn is_number(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(value.is_instance_of::<PyInt>() || value.hasattr("__index__")? && !value.hasattr("__len__")?)
}

/// A keyword that may be left out, where `None` is a value. Written `...` in Python.
#[derive(Debug)]
pub(crate) struct Given<'py>(pub(crate) Option<Bound<'py, PyAny>>);

impl<'py> FromPyObject<'_, 'py> for Given<'py> {
    type Error = std::convert::Infallible;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> Result<Self, Self::Error> {
        Ok(Self((!value.is(value.py().Ellipsis())).then(|| value.to_owned())))
    }
}

fn index(value: &Bound<'_, PyAny>) -> Option<i128> {
    if value.is_instance_of::<PyInt>() {
        return value.extract().ok();
    }
    value.call_method0("__index__").ok()?.extract().ok()
}

/// A value in an error: short, whatever it is.
pub(crate) fn shown(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(|_| "an object without repr".into(), |r| r.to_string());
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// A one-dimensional, contiguous buffer of exactly this type.
fn flat<T: Element>(value: &Bound<'_, PyAny>) -> Option<PyBuffer<T>> {
    buffer(value).filter(|b| b.dimensions() == 1 && b.is_c_contiguous())
}

/// A buffer of this type in the machine's own byte order, which `PyBuffer` itself does not look at.
pub(crate) fn buffer<T: Element>(value: &Bound<'_, PyAny>) -> Option<PyBuffer<T>> {
    let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
    let own = |b: &PyBuffer<T>| b.format().to_bytes().first().is_none_or(|order| !foreign.contains(order));
    PyBuffer::get(value).ok().filter(own)
}

/// A whole number of Python's; a bool is none.
pub(crate) fn integer(value: &Bound<'_, PyAny>) -> Option<i128> {
    if value.is_instance_of::<PyBool>() { None } else { index(value) }
}

/// True or False, and nothing that only looks like it.
pub(crate) fn flag(value: &Bound<'_, PyAny>, name: &str) -> PyResult<bool> {
    let flag = value.cast::<PyBool>().map(|flag| flag.is_true());
    flag.map_err(|_| InvalidArgument::new_err(format!("{name} is {}; it is True or False", shown(value))))
}

/// What an iterable gives, up to `most` items: an endless one ends in an error, and Ctrl-C is heard.
pub(crate) fn collected<'py, R>(
    items: pyo3::Bound<'py, pyo3::types::PyIterator>,
    name: &str,
    most: usize,
    mut each: impl FnMut(usize, Bound<'py, PyAny>) -> PyResult<R>,
) -> PyResult<Vec<R>> {
    let py = items.py();
    let mut all = Vec::new();
    for (at, item) in items.enumerate() {
        if at == most {
            return Err(InvalidArgument::new_err(format!(
                "{name}: more than {most} items, which can't be right"
            )));
        }
        if at % 4096 == 4095 {
            py.check_signals()?;
        }
        all.push(each(at, item?)?);
    }
    Ok(all)
}

/// The most scopes of one call.
pub(crate) const MOST_SCOPES: usize = 4096;

/// The most page references or keys of one call.
pub(crate) const MOST_PAGES: usize = 1 << 24;

/// Text that can be written as UTF-8, as Python has it.
pub(crate) fn text_ref<'a>(value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    let text = value.cast::<PyString>().ok().and_then(|text| text.to_str().ok());
    text.ok_or_else(|| InvalidArgument::new_err(format!("{} is no valid text", shown(value))))
}

/// Text that can be written as UTF-8.
pub(crate) fn text(value: &Bound<'_, PyAny>) -> PyResult<String> {
    text_ref(value).map(str::to_owned)
}

/// The elements of a buffer of any integer type.
fn integers<R>(
    value: &Bound<'_, PyAny>,
    mut each: impl FnMut(i128) -> PyResult<R>,
) -> PyResult<Option<Vec<R>>> {
    macro_rules! try_type {
        ($($int:ty),*) => {$(
            if let Some(buffer) = flat::<$int>(value) {
                let numbers = buffer.to_vec(value.py())?;
                return numbers.into_iter().map(|n| each(n.into())).collect::<PyResult<_>>().map(Some);
            }
        )*};
    }
    try_type!(i32, i64, u32, u64, i16, u16, u8, i8);
    Ok(None)
}

/// The most room made in advance: an absurd `max_new_tokens` must not take memory before it is refused.
const MOST_ROOM: usize = 1 << 16;

/// Token ids: an int32 array costs nothing, a list is read one by one, any buffer of whole numbers will do.
///
/// `more`: room for so many tokens behind them.
pub(crate) fn tokens(value: &Bound<'_, PyAny>, more: usize) -> PyResult<Vec<u32>> {
    const MOST: i128 = i32::MAX as i128;
    let bad = |at: usize, id: &dyn std::fmt::Display| {
        InvalidArgument::new_err(format!("token id {id} at position {at}; ids go from 0 to {MOST}"))
    };
    if let Some(buffer) = flat::<i32>(value) {
        let mut ids = buffer.to_vec(value.py())?;
        ids.reserve(more.min(MOST_ROOM));
        let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect(); // in place
        // Every bit of every id at once: the loop has no branch.
        if ids.iter().fold(0, |bits, id| bits | id) <= i32::MAX as u32 {
            return Ok(ids);
        }
        let at = ids.iter().position(|&id| id > i32::MAX as u32).unwrap_or(0);
        return Err(bad(at, &(ids[at] as i32)));
    }
    if let Ok(list) = value.cast::<PyList>() {
        let mut ids = Vec::with_capacity(list.len().saturating_add(more.min(MOST_ROOM)));
        for (at, item) in list.iter().enumerate() {
            ids.push(token(&item, at)?);
        }
        return Ok(ids);
    }
    if let Ok(tuple) = value.cast::<PyTuple>() {
        return tuple.iter().enumerate().map(|(at, item)| token(&item, at)).collect();
    }
    if value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyByteArray>()
    {
        return Err(InvalidArgument::new_err("token ids can't be text or bytes; tokenize first"));
    }
    let mut at = 0;
    let read = integers(value, |id| {
        at += 1;
        if (0..=MOST).contains(&id) { Ok(id as u32) } else { Err(bad(at - 1, &id)) }
    })?;
    if let Some(ids) = read {
        return Ok(ids);
    }
    // Tensors on the host, and arrays that are not contiguous, become arrays; anything else has to be a sequence.
    if value.len().is_ok_and(|n| n > MAX_TOKENS as usize) {
        return Err(InvalidArgument::new_err(format!(
            "{} token ids; a sequence has at most {MAX_TOKENS}",
            value.len()?
        )));
    }
    let numpy = value.py().import("numpy")?;
    let array = numpy.call_method1("asarray", (value,))?;
    let kind: String = array.getattr("dtype")?.getattr("kind")?.extract()?;
    let dimensions: usize = array.getattr("ndim")?.extract()?;
    if dimensions != 1 || !matches!(kind.as_str(), "i" | "u") {
        return Err(InvalidArgument::new_err(format!(
            "token ids must be a flat sequence of whole numbers; got {} of {} dimension(s) and dtype {}",
            value.get_type().name()?,
            dimensions,
            array.getattr("dtype")?
        )));
    }
    tokens(&numpy.call_method1("ascontiguousarray", (array,))?.call_method0("tolist")?, more)
}

#[inline]
fn token(item: &Bound<'_, PyAny>, at: usize) -> PyResult<u32> {
    match item.extract::<i32>() {
        Ok(id) if id >= 0 && !item.is_instance_of::<PyBool>() => Ok(id as u32),
        _ => Err(InvalidArgument::new_err(format!(
            "token id {} at position {at}; ids are whole numbers from 0 to {}",
            shown(item),
            i32::MAX
        ))),
    }
}

/// int32 numbers per row, of which there are at most `most`.
pub(crate) fn with_int32<R>(
    value: &Bound<'_, PyAny>,
    name: &str,
    most: usize,
    f: impl FnOnce(&[i32]) -> R,
) -> PyResult<R> {
    if let Some(buffer) = flat::<i32>(value) {
        // Python may write to the buffer at any time, so the core gets a copy.
        return Ok(f(&buffer.to_vec(value.py())?));
    }
    let outside =
        |n: &dyn std::fmt::Display| InvalidArgument::new_err(format!("{name}: {n} is not an int32 number"));
    if let Some(numbers) = integers(value, |n| i32::try_from(n).map_err(|_| outside(&n)))? {
        return Ok(f(&numbers));
    }
    let items = value.try_iter().map_err(|_| {
        InvalidArgument::new_err(format!(
            "{name} must be an int32 array or a list of ints, not {}",
            shown(value)
        ))
    })?;
    // What says how long it is ends, and the core says how many there should be.
    let most = most.max(value.len().map_or(0, |n| n.min(1 << 21)));
    let numbers = collected(items, name, most, |_, item| match item.extract::<i32>() {
        Ok(number) if !item.is_instance_of::<PyBool>() => Ok(number),
        _ => Err(outside(&shown(&item))),
    })?;
    Ok(f(&numbers))
}

/// Page references: (generation, id) in 64 bits each.
pub(crate) fn references(value: &Bound<'_, PyAny>) -> PyResult<Vec<PageRef>> {
    let reference = |n: i128| {
        u64::try_from(n)
            .map(PageRef::from_bits)
            .map_err(|_| InvalidArgument::new_err(format!("{n} is no page reference")))
    };
    if let Some(references) = integers(value, reference)? {
        return Ok(references);
    }
    let items = value.try_iter().map_err(|_| {
        InvalidArgument::new_err(format!(
            "page references must be a uint64 array or a list of ints, not {}",
            shown(value)
        ))
    })?;
    collected(items, "pages", MOST_PAGES, |_, item| {
        let number = integer(&item);
        number
            .ok_or_else(|| InvalidArgument::new_err(format!("{} is no page reference", shown(&item))))
            .and_then(reference)
    })
}

/// Seconds as milliseconds.
pub(crate) fn milliseconds(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    let seconds = if value.is_instance_of::<PyBool>() { None } else { value.extract::<f64>().ok() };
    match seconds.map(|s| (s * 1000.0).ceil()) {
        Some(ms) if (0.0..1e15).contains(&ms) => Ok(ms as u64),
        _ => Err(InvalidArgument::new_err(format!(
            "{name} is {}; it must be a number of seconds from 0 to 10^12",
            shown(value)
        ))),
    }
}

/// A time to live, in milliseconds; `None` is no end.
pub(crate) fn ttl(value: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    if value.is_none() { Ok(None) } else { milliseconds(value, "ttl").map(Some) }
}

/// A key as the hash takes it.
pub(crate) fn text_or_bytes(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(text) = value.cast::<PyString>() {
        return self::text(text).map(String::into_bytes);
    }
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok(bytes.as_bytes().to_vec());
    }
    Err(InvalidArgument::new_err(format!("keys are text or bytes, not {}", shown(value))))
}
