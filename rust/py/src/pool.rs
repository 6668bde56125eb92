//! `kvalloc.Pool`.

use std::sync::Arc;

use kvalloc_core::{
    arrays::Shape,
    error::Error,
    hash::Secret,
    ledger::ROOT,
    pool::{Options, Pool as Core},
    sequence::Open,
    spec::Spec as CoreSpec,
    word::{TenantId, Tier},
};
use pyo3::{prelude::*, types::PyBytes};

use crate::{
    args::{self, Given, text_or_bytes},
    batch::Batch,
    books::{Admission, AuditReport},
    errors::{self, InvalidArgument},
    events::Events,
    owner::Owner,
    pages::Pages,
    pin::Pin,
    sequence::Sequence,
    spec::Spec,
    stats::Stats,
    tenant::{self, Changes, Tenant},
};

/// The books over one device arena (and one host arena): pages, tenants, prefixes. No tensor.
///
/// Parameters
/// ----------
/// spec : KVSpec
///     The geometry: layer groups, dtypes, tokens of a page.
/// device_bytes : int or str
///     Bytes of the device arena, or text such as ``"24GiB"``. Rounded down to whole extents; ``capacity`` says what is
///     left.
/// host_bytes : int or str, optional
///     Bytes of the host tier, where the pages of suspended sequences go: see `suspend`. Default: there is none.
/// secret : bytes, optional
///     16 bytes for the keyed hash of the prefix index. Pools of several processes with one secret give equal prompts equal
///     keys. Default: random.
/// max_tenants : int, optional
///     The most tenants the pool can ever have.
/// default_tenant : str, optional
///     A tenant that is made at once and stands for every unknown name. Without it an unknown name is refused.
/// compare_tokens : bool, optional
///     Compare the stored tokens too on every hit: no collision of keys, found or forced, serves the wrong KV.
/// clock : {"system", "manual"}, optional
///     A manual clock stands still until ``advance`` moves it: for tests and simulations.
/// events : int, optional
///     Slots of the event ring, see the method ``events``. 0, the default: events are off, and the method returns none.
/// force_collisions : bool, optional
///     Give all pages one key, to show that the comparison of tokens holds. For tests.
///
/// Raises
/// ------
/// InvalidArgument
///     For a size that can't be read, holds no page or too many; a secret that has not 16 bytes; an unknown clock.
/// TenantError
///     If ``default_tenant`` is no name.
///
/// Notes
/// -----
/// All methods may be called from any number of threads at once; nothing in them waits for another thread. The same calls
/// in one thread give the same page numbers every time. A pool belongs to the process that made it: after ``fork()`` the
/// child's copy raises `ClosedError`.
///
/// A pool is a context manager that closes itself.
///
/// Examples
/// --------
/// >>> spec = kvalloc.KVSpec.uniform(layers=28, kv_heads=4, head_dim=128, dtype="float16", page_tokens=16)
/// >>> with kvalloc.Pool(spec, device_bytes="1GiB") as pool:
/// ...     acme = pool.tenant("acme", reserve="256MiB")
/// ...     pool.free == pool.capacity <= 1 << 30
/// True
#[pyclass(frozen, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) owner: Owner,
    pub(crate) spec: Py<PyAny>,
    default: Option<TenantId>,
}

impl Pool {
    fn live(&self) -> PyResult<&Arc<Core>> {
        self.owner.live()
    }

    /// Pairs of a scope and a number of tokens.
    fn share(&self, pairs: &Bound<'_, PyAny>) -> PyResult<Vec<(TenantId, u32)>> {
        let wrong = || {
            InvalidArgument::new_err(format!(
                "share is a list of (scope, tokens), one after the other from the prompt's start, not {}",
                args::shown(pairs)
            ))
        };
        let pairs = pairs.try_iter().map_err(|_| wrong())?;
        args::collected(pairs, "share", args::MOST_SCOPES, |_, pair| {
            let (scope, tokens): (Bound<'_, PyAny>, Bound<'_, PyAny>) =
                pair.extract().map_err(|_| wrong())?;
            let tokens = args::number(&tokens, "the tokens of a share", 0, u64::from(u32::MAX))?;
            Ok((self.owner.tenant(&scope, None)?, tokens as u32))
        })
    }
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (
        spec, device_bytes, host_bytes = None, *, secret = None, max_tenants = 4096, default_tenant = None,
        compare_tokens = true, clock = "system", events = 0, force_collisions = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a constructor")]
    fn new(
        spec: &Bound<'_, PyAny>,
        device_bytes: &Bound<'_, PyAny>,
        host_bytes: Option<&Bound<'_, PyAny>>,
        secret: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::max_tenants)] max_tenants: u32,
        default_tenant: Option<&Bound<'_, PyAny>>,
        compare_tokens: bool,
        #[pyo3(from_py_with = args::text_ref)] clock: &str,
        #[pyo3(from_py_with = args::events)] events: u32,
        force_collisions: bool,
    ) -> PyResult<Self> {
        let native = spec.getattr("_native").and_then(|n| Ok(n.cast_into::<Spec>()?)).map_err(|_| {
            InvalidArgument::new_err(format!("spec must be a KVSpec, not {}", args::shown(spec)))
        })?;
        let geometry: &CoreSpec = native.get().core();
        let digest = spec.getattr("digest")?.extract()?;
        let secret = match secret {
            None => None,
            Some(secret) => {
                // Never shown: the error says only how long it is.
                let bytes = secret.cast::<PyBytes>().ok().map(|b| b.as_bytes().to_vec());
                let bytes: Option<[u8; 16]> = bytes.and_then(|b| b.try_into().ok());
                Some(Secret::from_bytes(bytes.ok_or_else(|| {
                    InvalidArgument::new_err("secret must be 16 bytes, for instance os.urandom(16)")
                })?))
            }
        };
        let manual_clock = match clock {
            "system" => false,
            "manual" => true,
            other => {
                return Err(InvalidArgument::new_err(format!(
                    "clock is {other:?}; it is \"system\" or \"manual\""
                )));
            }
        };
        let options = Options {
            device_bytes: args::bytes(device_bytes)?,
            host_bytes: host_bytes.map_or(Ok(0), args::bytes)?,
            secret,
            max_tenants,
            compare_tokens,
            manual_clock,
            events,
            force_collisions,
        };
        let core =
            Core::new(geometry.clone(), &options).map_err(|e| InvalidArgument::new_err(e.to_string()))?;
        let owner = Owner::new(core, digest);
        let default = default_tenant
            .map(|name| {
                let name = args::text(name)?;
                tenant::check_length(&name)?;
                let made = owner.core.ledger().create(ROOT, &name, &Default::default());
                made.map_err(|e| errors::TenantError::new_err(e.to_string()))
            })
            .transpose()?;
        if events > 0 {
            owner.core.turn_events(true);
        }
        Ok(Self { owner, spec: spec.clone().unbind(), default })
    }

    /// Make a tenant, or change what is given of one that exists.
    ///
    /// Parameters
    /// ----------
    /// name : str
    ///     1 to 128 bytes of UTF-8 without ``/``, control or invisible characters, blanks at the ends.
    /// reserve : int or str, optional
    ///     Bytes that are available to the tenant's subtree at once, whatever others do. Rounded up to whole units (the largest
    ///     common divisor of all page sizes). Default 0.
    /// limit : int, str or None, optional
    ///     The most bytes charged to the subtree; None: the pool's capacity. Rounded down. Lowering it below use breaks nobody:
    ///     new allocation is refused.
    /// host_limit : int, str or None, optional
    ///     The same for the host tier: the most bytes there charged to the subtree; None: the whole tier. Where it is reached the
    ///     tenant's sequences are not swapped or offloaded any more: what takes memory back goes on with its next step, as where
    ///     the tier is full. Lowered below use, what is there comes back or ends as ever. Default None.
    /// weight : int, optional
    ///     1 to 65,536. Twice the weight: twice as much above the reserve before it gives back first. Default 1.
    /// priority : int, optional
    ///     0 to 100. Among equals the lower gives back first. Default 50.
    /// parent : Tenant or str, optional
    ///     The tenant above it. A tenant that exists can't move. Default: the root.
    /// publish : sequence or dict, optional
    ///     Tenants above it whose scope it may publish prefixes into, which they then pay for: a list of them, or a dict with the
    ///     most bytes charged there (None: no bound). Default: only its own scope.
    /// pin_budget : int or str, optional
    ///     Bytes that it may pin. Default 0: nothing.
    /// lend : bool, optional
    ///     Whether sequences of others may run in what it does not use of its reserve. It comes back by `Pool.give_back`, from
    ///     what others have beyond their own reserves: there with one plan, so with an engine's next step. Of the device alone;
    ///     `host` reserves are not lent. Default False. To end it what is lent must be there; else it is refused as a reserve is.
    /// compress : bool, optional
    ///     Whether pages it pays for may go on in a smaller class (`compress`), which makes them less exact for good. Default
    ///     False.
    /// cut : int, optional
    ///     Its contexts may lose pages (`cut`): the model forgets what stood there. So many tokens at the end always stay, and the
    ///     first page. Default None: they are never cut.
    ///
    /// Returns
    /// -------
    /// Tenant
    ///
    /// Raises
    /// ------
    /// TenantError
    ///     If the name is none; if the reserve does not fit beside what is held and reserved (nobody's memory is taken for it),
    ///     or lies above the limit; if the tree is full or too deep; if the tenant stands below another parent.
    /// UnknownTenant
    ///     If ``parent`` or a scope is not there.
    /// InvalidArgument
    ///     For sizes and numbers that mean nothing.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> org = pool.tenant("org", limit="48MiB")
    /// >>> acme = pool.tenant("acme", parent=org, reserve="16MiB", publish={"org": "8MiB"})
    /// >>> pool.tenant("acme", weight=3) == acme  # the rest stays
    /// True
    /// >>> acme.weight, acme.reserve, acme.publish
    /// (3, 16777216, {'org': 8388608})
    #[pyo3(signature = (
        name, *, reserve = Given(None), limit = Given(None), host_limit = Given(None), weight = Given(None),
        priority = Given(None), parent = Given(None), publish = Given(None), pin_budget = Given(None),
        lend = Given(None), compress = Given(None), cut = Given(None)
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn tenant(
        &self,
        #[pyo3(from_py_with = args::text)] name: String,
        reserve: Given<'_>,
        limit: Given<'_>,
        host_limit: Given<'_>,
        weight: Given<'_>,
        priority: Given<'_>,
        parent: Given<'_>,
        publish: Given<'_>,
        pin_budget: Given<'_>,
        lend: Given<'_>,
        compress: Given<'_>,
        cut: Given<'_>,
    ) -> PyResult<Tenant> {
        let owner = self.live().map(|_| &self.owner)?;
        let changes = Changes {
            reserve,
            limit,
            host_limit,
            weight,
            priority,
            parent,
            publish,
            pin_budget,
            lend,
            compress,
            cut,
        };
        tenant::create(owner, &name, &changes)
    }

    /// Take a tenant out of the tree; its cached pages become free.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant or str
    ///     One without tenants below it, open sequences, held pages and promises; not the ``default_tenant``. Its pins end.
    ///
    /// Returns
    /// -------
    /// int
    ///     How many cached pages became free.
    ///
    /// Raises
    /// ------
    /// TenantError
    ///     It has tenants below it, open sequences, or pages that are held or promised; it is the ``default_tenant``. It stays.
    /// UnknownTenant, ClosedError
    fn remove_tenant(&self, py: Python<'_>, tenant: &Bound<'_, PyAny>) -> PyResult<u64> {
        let core = self.live()?;
        let id = self.owner.tenant(tenant, None)?;
        if self.default == Some(id) {
            return Err(errors::TenantError::new_err(format!(
                "{:?} is the pool's default_tenant, which stands for every unknown name; it can't be removed",
                errors::name_of(core, id)
            )));
        }
        core.remove_tenant(id).map_err(|e| self.owner.error(py, &e))
    }

    /// Every tenant, in the order in which they were made.
    ///
    /// Returns
    /// -------
    /// list of Tenant
    fn tenants(&self) -> PyResult<Vec<Tenant>> {
        let core = self.live()?;
        Ok(core.ledger().ids().filter_map(|id| Tenant::of(&self.owner, id)).collect())
    }

    /// May this request start now? Nothing is taken.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant or str
    ///     Who asks.
    /// prompt_ids : int32 array, sequence of int, or int
    ///     The prompt, or its length. With ids, pages of the prompt that others of the tenant hold already are not counted.
    /// max_new_tokens : int, optional
    ///     How many tokens it may grow by.
    /// share, adapter, adapter_generation, extra_key : optional
    ///     As in `open`.
    ///
    /// Returns
    /// -------
    /// Admission
    ///     Its ``verdict`` is ``"now"``, ``"wait"`` (until ``behind`` gives something back) or ``"never"``, which is final: it
    ///     depends on limits, reserves and the pool's size alone, and not on what others hold.
    ///
    /// Raises
    /// ------
    /// UnknownTenant, InvalidArgument
    ///     No such tenant; an empty prompt, ids outside int32, more than 2**30 tokens.
    ///
    /// Notes
    /// -----
    /// The need is the most bytes the sequence holds on its way to ``len(prompt) + max_new_tokens`` tokens, windows and chunks
    /// taken into account, less the pages of its prompt that others hold already. The answer is about a moment: `open` with
    /// ``admit=True`` is what reserves.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> acme = pool.tenant("acme", limit="1MiB")
    /// >>> pool.admit(acme, 100, max_new_tokens=28).verdict
    /// 'now'
    /// >>> answer = pool.admit(acme, 100, max_new_tokens=1000)
    /// >>> answer.verdict, answer.bytes > answer.room, answer.behind
    /// ('never', True, 'acme')
    #[pyo3(signature = (
        tenant, prompt_ids, max_new_tokens = 0, *, share = None, adapter = None, adapter_generation = 0,
        extra_key = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn admit(
        &self,
        py: Python<'_>,
        tenant: &Bound<'_, PyAny>,
        prompt_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::max_new_tokens)] max_new_tokens: u32,
        share: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::adapter_generation)] adapter_generation: u64,
        extra_key: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Admission> {
        let core = self.live()?;
        let id = self.owner.tenant(tenant, self.default)?;
        let (tokens, length) = if args::is_number(prompt_ids)? {
            (Vec::new(), args::number(prompt_ids, "the prompt's length", 1, u64::from(u32::MAX))? as u32)
        } else {
            let ids = args::tokens(prompt_ids, 0)?;
            let length = ids.len() as u32;
            (ids, length)
        };
        let share = share.map_or(Ok(Vec::new()), |share| self.share(share))?;
        let adapter = adapter.map(text_or_bytes).transpose()?;
        let extra_key = extra_key.map(text_or_bytes).transpose()?;
        let open = Open {
            tokens,
            max_new_tokens,
            share: &share,
            adapter: adapter.as_deref(),
            adapter_generation,
            extra_key: extra_key.as_deref(),
            ..Open::default()
        };
        let answer = core.admit(id, &open, length).map_err(|e| self.owner.error(py, &e))?;
        Ok(Admission::new(core, id, &answer))
    }

    /// Open a sequence: look its prompt up, and reference what is cached, in one step.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant or str
    ///     Whose it is.
    /// prompt_ids : int32 array or sequence of int
    ///     Token ids, 0 to 2**31 - 1, one dimension, at least one. A contiguous int32 array (any buffer of that format) is read
    ///     fastest; other integer buffers, lists, and tensors in host memory are converted.
    /// max_new_tokens : int, optional
    ///     How many tokens it may grow by: counted with ``admit``, and room made for them.
    /// share : list of (Tenant or str, int), optional
    ///     Parts of the prompt that are shared under a tenant at or above this one: so many tokens each, one after the other from
    ///     the prompt's start. What follows is shared within the sequence's own tenant only.
    /// adapter : str or bytes, optional
    ///     Name of the adapter the KV depends on. Different adapters share nothing.
    /// adapter_generation : int, optional
    ///     Which weights the adapter's name stands for now. New weights under an old name: count it up.
    /// extra_key : str or bytes, optional
    ///     Whatever else the KV depends on: a salt, a digest of the images.
    /// priority : int, optional
    ///     0 to 100: how much its published pages are protected from eviction. A bias, never a lock.
    /// ttl : float, optional
    ///     Seconds of the pool's clock after which that protection ends. Default: it stays.
    /// admit : bool, optional
    ///     Reserve the whole need now, or refuse: then there is room for it until it has ``len(prompt_ids) +
    ///     max_new_tokens`` tokens. With a window group that is its need page by page: a step may give it less of a long
    ///     prompt at once than was asked for.
    ///
    /// Returns
    /// -------
    /// Sequence
    ///     ``cached_tokens`` says how much was found. It holds no other page yet: a batch's step gives it room.
    ///
    /// Raises
    /// ------
    /// AdmissionRefused
    ///     With ``admit`` only. ``verdict`` is ``"wait"`` or ``"never"``; ``asked`` and ``room`` are bytes, ``level`` is the
    ///     tenant in the way. An `OutOfPages`, so a `MemoryError`.
    /// TenantError, UnknownTenant
    ///     A scope that is neither the tenant nor above it; no such tenant.
    /// InvalidArgument
    ///     An empty prompt, ids outside int32, the wrong shape or dtype, more than 2**30 tokens.
    /// ClosedError
    ///     The pool is closed.
    ///
    /// Notes
    /// -----
    /// Whole pages are hit, and the last token never: something has to be computed. A hit ends at the first gap. With several
    /// layer groups, the longest hit counts for which every group has all that decoding from there needs. A cached page that
    /// becomes held is an allocation for reserves and limits; where it is refused, the hit ends.
    ///
    /// A page belongs to the part of the prompt in which its last token lies. New pages of a part are charged to its scope, if
    /// the tenant's policy has the right to publish there (``publish``) and the bytes are not used up; else what is there is hit,
    /// and the rest becomes the tenant's own: ``Sequence.fallbacks`` tells.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> org = pool.tenant("org")
    /// >>> acme = pool.tenant("acme", parent=org, publish=[org])
    /// >>> prompt = np.arange(100, dtype=np.int32)
    /// >>> with pool.batch(max_sequences=4, max_tokens=512) as batch:
    /// ...     first = pool.open(acme, prompt, max_new_tokens=8, share=[(org, 64)], admit=True)
    /// ...     row = batch.add(first)
    /// ...     out = batch.step()
    /// ...     batch.commit([7])  # the KV is written: full pages can be found from now on
    /// >>> pool.open("acme", prompt, share=[("org", 64)]).cached_tokens
    /// 96
    /// >>> pool.open("org", prompt).cached_tokens  # what is acme's own stays its own
    /// 64
    #[pyo3(signature = (
        tenant, prompt_ids, max_new_tokens = 0, *, share = None, adapter = None, adapter_generation = 0,
        extra_key = None, priority = 0, ttl = None, admit = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn open(
        &self,
        py: Python<'_>,
        tenant: &Bound<'_, PyAny>,
        prompt_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::max_new_tokens)] max_new_tokens: u32,
        share: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::adapter_generation)] adapter_generation: u64,
        extra_key: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::priority)] priority: u8,
        #[pyo3(from_py_with = args::ttl)] ttl: Option<u64>,
        admit: bool,
    ) -> PyResult<Sequence> {
        let core = self.live()?;
        let id = self.owner.tenant(tenant, self.default)?;
        let tokens = args::tokens(prompt_ids, max_new_tokens as usize)?;
        let share = share.map_or(Ok(Vec::new()), |share| self.share(share))?;
        let adapter = adapter.map(text_or_bytes).transpose()?;
        let extra_key = extra_key.map(text_or_bytes).transpose()?;
        let open = Open {
            tokens,
            max_new_tokens,
            admit,
            share: &share,
            adapter: adapter.as_deref(),
            adapter_generation,
            extra_key: extra_key.as_deref(),
            protection: priority,
            protection_ms: ttl.unwrap_or(0),
        };
        // Hashing a long prompt takes longer than letting go of the interpreter.
        let long = open.tokens.len() > LONG_PROMPT;
        let opened = if long { py.detach(|| core.open(id, open)) } else { core.open(id, open) };
        match opened {
            Ok(sequence) => Ok(Sequence { owner: self.owner.clone(), core: sequence }),
            Err(Error::Refused(refusal)) if admit => Err(errors::admission(py, core, "wait", &refusal)),
            Err(error) => Err(self.owner.error(py, &error)),
        }
    }

    /// Make a batch: rows that persist between steps, and the arrays that kernels read.
    ///
    /// Parameters
    /// ----------
    /// max_sequences : int
    ///     Rows, 1 to 2**20.
    /// max_tokens : int
    ///     The longest sequence a row can show, 1 to 2**30.
    /// max_step_tokens : int, optional
    ///     The most tokens of one step, at least ``max_sequences``: the length of ``slot_mapping`` and ``positions``. Default:
    ///     ``max(min(max_tokens, 2**20), min(max_sequences * max_tokens, 65536)) + max_sequences``; what is longer takes several
    ///     steps.
    ///
    /// Returns
    /// -------
    /// Batch
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     For numbers out of range; if a block table would have more than 2**31 entries; if the pool has too many batches.
    #[pyo3(signature = (max_sequences, max_tokens, *, max_step_tokens = None))]
    fn batch(
        slf: &Bound<'_, Self>,
        max_sequences: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
        max_step_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Batch> {
        let core = slf.get().live()?;
        let rows = args::number(max_sequences, "max_sequences", 1, 1 << 20)?;
        let tokens =
            args::number(max_tokens, "max_tokens", 1, u64::from(kvalloc_core::sequence::MAX_TOKENS))?;
        let default = tokens.min(1 << 20).max((rows * tokens).min(65_536)) + rows;
        let step = match max_step_tokens {
            Some(value) => args::number(value, "max_step_tokens", rows, 1 << 30)?,
            None => default,
        };
        let pages = tokens.div_ceil(u64::from(core.spec().page_tokens()));
        if rows * pages > 1 << 31 {
            return Err(InvalidArgument::new_err(format!(
                "a block table of {rows} rows of {pages} pages; at most 2^31 entries: use fewer rows or shorter ones"
            )));
        }
        let shape =
            Shape { rows: rows as usize, tokens: tokens as u32, pages: pages as usize, step: step as u32 };
        Batch::new(slf, shape)
    }

    /// Pages : The lower face, for engines that keep their own tables.
    #[getter]
    fn pages(&self) -> PyResult<Pages> {
        Ok(Pages::new(&self.owner, self.live()?, self.default))
    }

    /// Keep the published pages of a sequence's first tokens, whatever happens to the sequence.
    ///
    /// Parameters
    /// ----------
    /// sequence : Sequence
    ///     It must hold the pages at this moment.
    /// tokens : int
    ///     How many tokens from its start; rounded down to whole pages that are published. Pages that left a window, and fixed
    ///     states, are not pinned.
    /// owner : Tenant or str
    ///     Whose budget (``pin_budget``) the bytes count against. Several pins of one page count each.
    /// ttl : float, optional
    ///     Seconds of the pool's clock until it expires. Default: it stays until it is unpinned.
    /// label : str, optional
    ///     For people who read the list.
    ///
    /// Returns
    /// -------
    /// Pin
    ///     A context manager that unpins at the end of the block. Dropping the object does not unpin.
    ///
    /// Raises
    /// ------
    /// PinError
    ///     No page of these tokens is published, or the budget is used up: nothing is pinned then.
    /// SequenceBusy, ClosedError, WrongPool, UnknownTenant
    ///
    /// Notes
    /// -----
    /// A pin is a lock: its pages are not evicted, and count as pinned (never as cached, which is what can be taken back) once
    /// nobody references them.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> acme = pool.tenant("acme", pin_budget="1MiB")
    /// >>> batch = pool.batch(max_sequences=1, max_tokens=512)
    /// >>> seq = pool.open(acme, range(64))
    /// >>> row, out = batch.add(seq), batch.step()
    /// >>> batch.commit()
    /// >>> with pool.pin(seq, 64, owner=acme, label="system prompt") as pin:
    /// ...     seq.close()
    /// ...     pin.pages, acme.pinned == pin.bytes, acme.cached
    /// (4, True, 0)
    /// >>> acme.pinned, acme.cached == pin.bytes
    /// (0, True)
    #[pyo3(signature = (sequence, tokens, *, owner, ttl = None, label = None))]
    fn pin(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        #[pyo3(from_py_with = args::tokens_to_pin)] tokens: u32,
        owner: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::ttl)] ttl: Option<u64>,
        label: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Pin> {
        let core = self.live()?;
        let owner = self.owner.tenant(owner, None)?;
        let label = label.map(args::text).transpose()?.unwrap_or_default();
        let pin =
            core.pin(&sequence.core, tokens, owner, ttl, &label).map_err(|e| self.owner.error(py, &e))?;
        Ok(Pin::new(&self.owner, core.pins(Some(owner)).into_iter().find(|p| p.id == pin), pin))
    }

    /// The pins that have not ended, oldest first.
    ///
    /// Parameters
    /// ----------
    /// owner : Tenant or str, optional
    ///     Only this tenant's.
    ///
    /// Returns
    /// -------
    /// list of Pin
    #[pyo3(signature = (owner = None))]
    fn pins(&self, owner: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<Pin>> {
        let core = self.live()?;
        let owner = owner.map(|o| self.owner.tenant(o, None)).transpose()?;
        Ok(core.pins(owner).into_iter().map(|pin| Pin::new(&self.owner, Some(pin.clone()), pin.id)).collect())
    }

    /// Check the books: every page, every counter, at any time, under load too. Nothing is changed.
    ///
    /// Returns
    /// -------
    /// AuditReport
    ///     True if no rule is broken. ``findings`` names the page that breaks one.
    ///
    /// Notes
    /// -----
    /// The sums (free + held + cached + pinned + in flight = capacity, per tier; each tenant's figures) mean something only if the
    /// books stood still while they were read. The audit tries that a few times and says in ``exact`` whether they did. If not, it
    /// has checked what holds for each page by itself at any instant, and gives the sums as it saw them.
    ///
    /// It reads every page: a few tenths of a second for a million that are in use.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> report = pool.audit()
    /// >>> report.ok, report.exact, report.device.free == report.device.capacity
    /// (True, True, True)
    fn audit(&self, py: Python<'_>) -> PyResult<AuditReport> {
        let core = self.live()?;
        Ok(AuditReport::new(py.detach(|| core.audit())))
    }

    /// What happened so far, counted.
    ///
    /// Returns
    /// -------
    /// Stats
    ///     A snapshot. What there is *now* (held, cached, free bytes) is read from the pool and its tenants.
    fn stats(&self) -> PyResult<Stats> {
        Ok(Stats::new(self.live()?))
    }

    /// What was published and removed since the last call. Off by default: make the pool with ``events=65536``, say.
    ///
    /// Parameters
    /// ----------
    /// max : int, optional
    ///     The most events to take.
    ///
    /// Returns
    /// -------
    /// Events
    ///     A sequence of dicts, oldest first. Every one has ``sequence`` (its number; a jump is a gap) and ``type``:
    ///
    ///     - ``"stored"``: a page can now be found. ``key`` and ``parent`` (int; None at the start of a prompt), ``page`` (its
    ///       reference), ``group``, ``scope`` (the tenant's name), ``tokens``, ``tier``.
    ///     - ``"removed"``: the last page with this ``key`` in the ``group`` and ``scope`` can't be found any more; ``tier``.
    ///     - ``"cleared"``: nothing is cached any more.
    ///
    /// Raises
    /// ------
    /// SequenceBusy
    ///     Another thread is draining events at this moment.
    ///
    /// Notes
    /// -----
    /// A page whose sequence was swapped out can't be found until it is back: "removed" is told when the plan that takes it off the
    /// device is committed, "stored" when one has brought it back. So is "removed" for a page that is compressed or cut, and for
    /// those of its sequence behind a cut, if it stands in a batch with that one's next step. While a plan is open its pages are
    /// not found either, and nothing is told: it may be aborted. ``tier`` is always "device".
    ///
    /// Copies of one content that did not know of each other may be told of one by one. Whoever keeps the keys as a set, by scope
    /// and group, never has one that can't be found, and may lack one that can.
    ///
    /// The ring has the ``events`` slots that the pool was made with. With 0, the default, nothing is recorded and the answer is
    /// always empty. Who publishes never waits: when the ring is full the oldest event is overwritten and counted in
    /// ``Events.lost``.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB", events=1024)
    /// >>> page = pool.pages.allocate(pool.tenant("acme"), 1)
    /// >>> pool.pages.publish("acme", page, [b"a key"])
    /// [True]
    /// >>> [(event["type"], event["scope"]) for event in pool.events()]
    /// [('stored', 'acme')]
    #[pyo3(signature = (max = 65536))]
    fn events(&self, py: Python<'_>, #[pyo3(from_py_with = args::max)] max: usize) -> PyResult<Events> {
        let core = self.live()?;
        let mut records = Vec::new();
        let drained = core.drain_events(max, &mut records).map_err(|e| self.owner.error(py, &e))?;
        Events::new(py, core, &records, drained)
    }

    /// Forget everything that is cached, because the weights changed. No later prompt hits anything from before.
    ///
    /// Returns
    /// -------
    /// int
    ///     How many pages became free.
    ///
    /// Raises
    /// ------
    /// InUse
    ///     Published pages are held or pinned (``pages``: how many): nothing was reset.
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<u64> {
        let core = self.live()?;
        py.detach(|| core.reset_prefix_cache()).map_err(|e| self.owner.error(py, &e))
    }

    /// Move a manual clock on.
    ///
    /// Parameters
    /// ----------
    /// seconds : float
    ///     At least 0.
    ///
    /// Returns
    /// -------
    /// float
    ///     The time it shows then, in seconds since the pool was made.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     The clock is the system's, or ``seconds`` is negative or no number.
    fn advance(&self, py: Python<'_>, seconds: &Bound<'_, PyAny>) -> PyResult<f64> {
        let core = self.live()?;
        let ms = args::milliseconds(seconds, "seconds")?;
        core.advance(ms).map(|now| now as f64 / 1000.0).map_err(|e| self.owner.error(py, &e))
    }

    /// Refuse everything new from now on.
    ///
    /// What was begun can be ended: steps that wait for their commit and open plans are committed or given up as before, and
    /// handles that exist give back what they hold when they are closed.
    fn close(&self) {
        self.owner.core.close();
    }

    /// bool : Whether the pool was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.owner.core.is_closed()
    }

    /// KVSpec : The geometry it was made with.
    #[getter]
    fn spec(&self, py: Python<'_>) -> Py<PyAny> {
        self.spec.clone_ref(py)
    }

    /// int : Usable bytes of the device arena, from frame 0 on: what a store allocates.
    #[getter]
    fn device_bytes(&self) -> PyResult<u64> {
        Ok(self.live()?.arena_bytes(Tier::Device))
    }

    /// int : Usable bytes of the host tier's arena; 0 if there is none.
    #[getter]
    fn host_bytes(&self) -> PyResult<u64> {
        Ok(self.live()?.arena_bytes(Tier::Host))
    }

    /// int : Bytes of the device arena that can be given out.
    #[getter]
    fn capacity(&self) -> PyResult<u64> {
        Ok(self.live()?.room_in(Tier::Device).0)
    }

    /// int : Bytes of the host tier that are in no page; 0 if there is no host tier.
    #[getter]
    fn host_free(&self) -> PyResult<u64> {
        Ok(self.live()?.room_in(Tier::Host).1)
    }

    /// int : Bytes that are in no page.
    #[getter]
    fn free(&self) -> PyResult<u64> {
        Ok(self.live()?.room_in(Tier::Device).1)
    }

    /// int : Free bytes that are of no use to pages of the size that is worst off, because they lie in extents that serve
    /// another size. 0 with a single page size.
    #[getter]
    fn fragmented(&self) -> PyResult<u64> {
        Ok(self.live()?.fragmented(Tier::Device))
    }

    /// int : Bytes of pages with references, of all tenants.
    #[getter]
    fn held(&self) -> PyResult<u64> {
        Ok(tenant::sum(self.live()?, |u| u.held.0))
    }

    /// int : Bytes of published pages without references, of all tenants: free to take.
    #[getter]
    fn cached(&self) -> PyResult<u64> {
        Ok(tenant::sum(self.live()?, |u| u.cached.0))
    }

    /// int : Bytes of pages that only a pin keeps, of all tenants.
    #[getter]
    fn pinned(&self) -> PyResult<u64> {
        Ok(tenant::sum(self.live()?, |u| u.pinned.0))
    }

    /// int : Bytes reserved for admitted sequences and not in use yet, of all tenants.
    #[getter]
    fn promised(&self) -> PyResult<u64> {
        Ok(tenant::sum(self.live()?, |u| u.promised.0))
    }

    /// float : Bytes of the books for each page; the tokens kept for comparison not counted.
    #[getter]
    fn metadata_bytes_per_page(&self) -> PyResult<f64> {
        let core = self.live()?;
        Ok(core.metadata_bytes() as f64 / f64::from(core.max_pages()))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyAny>) {
        self.close();
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let core = &self.owner.core;
        if core.is_closed() {
            return Ok("<kvalloc.Pool, closed>".into());
        }
        let (capacity, free) = core.room_in(Tier::Device);
        let format = py.import("kvalloc.sizes")?.getattr("format_bytes")?;
        Ok(format!(
            "<kvalloc.Pool {} free of {}, {} tenants>",
            format.call1((free,))?,
            format.call1((capacity,))?,
            core.ledger().len()
        ))
    }
}

/// Prompts longer than this are looked up without holding the interpreter.
const LONG_PROMPT: usize = 4096;
