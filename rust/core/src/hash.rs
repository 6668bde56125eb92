//! Content -> key: one keyed 128-bit hash per page, chained from the start of the sequence.
//!
//! The hash is SipHash-1-3 with a secret of 128 bits. Tokens are compared on a hit, so the hash has to resist flooding
//! (nobody can aim at one bucket of the index without the secret), not forgery.
//!
//! # What is hashed
//!
//! Every message begins with one word, bits 0-7 what kind of message it is, 8-31 the scope, 32-63 a count, so no
//! message of one kind equals one of another:
//!
//! | kind | count | then | gives |
//! | --- | --- | --- | --- |
//! | `ROOT` | fields | each field: its tag, whether it is there, its length, its bytes | the key before a sequence's first page |
//! | `PAGE` | tokens | the tokens, two to a word; the parent's key (two words) | the key of a page and of all before it |
//! | `CALLER_BYTES`, `CALLER_INT` | bytes | the group; the bytes, or the integer | the key of a page that its caller named |
//!
//! The parent comes last, so the processor absorbs the next page's tokens while it waits for this page's key: a long
//! prompt costs what the arithmetic costs, not the latency of the chain (measured: about 25 ns a page).
//!
//! # One hash for all layer groups
//!
//! [`ChainKey`] names content. [`Hasher::index_key`] makes of it the 64-bit key under which the index lists the page of
//! one group; the group's number is its lowest byte, so equal keys mean equal groups. [`Hasher::digest`] makes the 63
//! bits that a page without a parent in the index is linked to.
//!
//! Who may call: pool.rs and the rooms above. Nothing here is shared or changes.

use std::{fmt, hash::Hasher as _};

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::word::{GroupId, TenantId};

const ROOT: u64 = 1;
const PAGE: u64 = 2;
const CALLER_BYTES: u64 = 3;
const CALLER_INT: u64 = 4;

const ADAPTER: u64 = 1;
const ADAPTER_GENERATION: u64 = 2;
const EXTRA_KEY: u64 = 3;
const WEIGHTS: u64 = 4;
const ROOT_FIELDS: usize = 4;

const GROUP_MASK: u64 = 0xff;
/// Odd and without pattern (the golden ratio), so that the groups' keys of one page lie in unrelated buckets.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The default number of tokens of a page.
const USUAL_PAGE: usize = 16;

/// The longest key a caller can give a page, in bytes.
pub const MAX_CALLER_KEY: usize = 64;

/// The secret of a pool's keys. Pools with the same secret give the same content the same key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret([u64; 2]);

impl Secret {
    /// A secret that nobody knows.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)?;
        Ok(Self::from_bytes(bytes))
    }
    /// A secret shared with other processes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        let both = u128::from_le_bytes(bytes);
        Self([both as u64, (both >> 64) as u64])
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The identity of a page's content and of all that came before it, under the pool's secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct ChainKey {
    low: u64,
    high: u64,
}

impl ChainKey {
    /// As 16 bytes, for events and for other processes with the same secret.
    pub fn to_bytes(self) -> [u8; 16] {
        (u128::from(self.low) | u128::from(self.high) << 64).to_le_bytes()
    }
}

/// All that changes the KV of a sequence besides its tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Context<'a> {
    /// The adapter's name.
    pub adapter: Option<&'a [u8]>,
    /// Which weights the adapter's name stands for now.
    pub adapter_generation: u64,
    /// The caller's own extra key (a salt, a digest of the images, ...).
    pub extra_key: Option<&'a [u8]>,
    /// Which weights the model has now.
    pub weights: u64,
}

/// A key that the caller computed for a page (the lower face).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallerKey<'a> {
    /// Bytes; at most [`MAX_CALLER_KEY`] are accepted by the pool.
    Bytes(&'a [u8]),
    /// An integer.
    Int(i128),
}

/// The keyed hash of one pool.
#[derive(Clone, Debug)]
pub struct Hasher {
    secret: Secret,
    collide: bool,
}

impl Hasher {
    /// `collide`: for tests; all pages of a group get one index key, so that only the exact comparison tells them apart.
    pub fn new(secret: Secret, collide: bool) -> Self {
        Self { secret, collide }
    }

    /// Begin a message. A fresh state each time, so that the compiler knows it is at a word's start: 3 ns less a page
    /// than a copy of a prepared one.
    #[inline(always)]
    fn begin(&self, kind: u64, scope: TenantId, count: usize) -> SipHasher13 {
        debug_assert!(scope.0 >> 24 == 0);
        let [low, high] = self.secret.0;
        let mut sip = SipHasher13::new_with_keys(low, high);
        sip.write_u64(kind | u64::from(scope.0) << 8 | (count as u64) << 32);
        sip
    }

    /// The key before the first page of a sequence.
    pub fn root(&self, context: &Context<'_>) -> ChainKey {
        let mut sip = self.begin(ROOT, TenantId(0), ROOT_FIELDS);
        let mut field = |tag: u64, value: Option<&[u8]>| {
            sip.write_u64(tag | u64::from(value.is_some()) << 8);
            let value = value.unwrap_or_default();
            sip.write_u64(value.len() as u64);
            sip.write(value);
        };
        field(ADAPTER, context.adapter);
        field(ADAPTER_GENERATION, Some(&context.adapter_generation.to_le_bytes()));
        field(EXTRA_KEY, context.extra_key);
        field(WEIGHTS, Some(&context.weights.to_le_bytes()));
        finish(sip)
    }

    /// The key of the page that holds `tokens` and continues `parent`, shared under `scope`.
    #[inline]
    pub fn page(&self, scope: TenantId, parent: ChainKey, tokens: &[u32]) -> ChainKey {
        match <&[u32; USUAL_PAGE]>::try_from(tokens) {
            // The same code, unrolled: 3 ns less.
            Ok(tokens) => self.absorb(scope, parent, tokens),
            Err(_) => self.absorb(scope, parent, tokens),
        }
    }

    #[inline(always)]
    fn absorb(&self, scope: TenantId, parent: ChainKey, tokens: &[u32]) -> ChainKey {
        let mut sip = self.begin(PAGE, scope, tokens.len());
        let (pairs, rest) = tokens.as_chunks::<2>();
        for &[first, second] in pairs {
            sip.write_u64(u64::from(first) | u64::from(second) << 32);
        }
        if let &[last] = rest {
            sip.write_u64(u64::from(last));
        }
        sip.write_u64(parent.low);
        sip.write_u64(parent.high);
        finish(sip)
    }

    /// The keys of all whole pages of `tokens`, which continue `parent`, in order.
    pub fn pages(
        &self,
        scope: TenantId,
        parent: ChainKey,
        page_tokens: usize,
        tokens: &[u32],
        keys: &mut Vec<ChainKey>,
    ) {
        keys.reserve(tokens.len() / page_tokens);
        let mut parent = parent;
        for page in tokens.chunks_exact(page_tokens) {
            parent = self.page(scope, parent, page);
            keys.push(parent);
        }
    }

    /// The key of a page that the caller named.
    pub fn caller(&self, scope: TenantId, group: GroupId, key: CallerKey<'_>) -> ChainKey {
        let (kind, bytes) = match key {
            CallerKey::Bytes(bytes) => (CALLER_BYTES, bytes),
            CallerKey::Int(ref int) => (CALLER_INT, &int.to_le_bytes()[..]),
        };
        let mut sip = self.begin(kind, scope, bytes.len());
        sip.write_u64(u64::from(group.0));
        sip.write(bytes);
        finish(sip)
    }

    /// The key under which the index lists the page of `group` with this content.
    #[inline]
    pub fn index_key(&self, key: ChainKey, group: GroupId) -> u64 {
        let group = u64::from(group.0);
        let mixed = if self.collide { SPREAD } else { key.low ^ group.wrapping_mul(SPREAD) };
        mixed & !GROUP_MASK | group
    }

    /// 63 bits for [`crate::page::Link::Digest`]: independent of the index key.
    #[inline]
    pub fn digest(&self, key: ChainKey) -> u64 {
        key.high >> 1
    }
}

#[inline]
fn finish(sip: SipHasher13) -> ChainKey {
    let hash = sip.finish128();
    ChainKey { low: hash.h1, high: hash.h2 }
}

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests {
    use super::*;

    fn hasher() -> Hasher {
        Hasher::new(Secret::from_bytes(*b"0123456789abcdef"), false)
    }

    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);
    const G: GroupId = GroupId(0);

    /// A page's message written out as bytes gives the same key.
    #[test]
    fn messages_are_what_the_head_of_the_file_says() {
        let hasher = hasher();
        let tokens: Vec<u32> = (0..16).map(|i| i * 77_777).collect();
        let parent = hasher.root(&Context::default());
        let mut bytes = (PAGE | 1 << 8 | 16 << 32).to_le_bytes().to_vec();
        tokens.iter().for_each(|t| bytes.extend(t.to_le_bytes()));
        bytes.extend(parent.to_bytes());
        let whole = SipHasher13::new_with_key(b"0123456789abcdef").hash(&bytes);
        let page = hasher.page(A, parent, &tokens);
        assert_eq!((page.low, page.high), (whole.h1, whole.h2));
    }

    #[test]
    fn a_chain_is_its_pages_one_by_one() {
        let hasher = hasher();
        let tokens: Vec<u32> = (0..53).collect();
        let root = hasher.root(&Context::default());
        let mut keys = vec![];
        hasher.pages(A, root, 16, &tokens, &mut keys);
        let mut parent = root;
        let single: Vec<_> = tokens
            .chunks_exact(16)
            .map(|page| {
                parent = hasher.page(A, parent, page);
                parent
            })
            .collect();
        assert_eq!(keys, single);
        assert_eq!(keys.len(), 3);
    }

    /// Case 21: an adapter named X, a salt X, both, neither.
    #[test]
    fn case_21_an_adapters_name_is_not_a_salt() {
        let hasher = hasher();
        let adapter = Context { adapter: Some(b"X"), ..Context::default() };
        let salt = Context { extra_key: Some(b"X"), ..Context::default() };
        let both = Context { adapter: Some(b"X"), extra_key: Some(b"X"), ..Context::default() };
        let empty = Context { adapter: Some(b""), ..Context::default() };
        let all = [Context::default(), adapter, salt, both, empty].map(|c| hasher.root(&c));
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b), "context {i} equals an earlier one");
        }
        let split = |a: &'static [u8], e: &'static [u8]| {
            hasher.root(&Context { adapter: Some(a), extra_key: Some(e), ..Context::default() })
        };
        assert_ne!(split(b"ab", b"c"), split(b"a", b"bc"));
    }

    /// Case 22 and 19: new weights under an old name, for the adapter and for the model.
    #[test]
    fn case_22_new_weights_give_new_keys() {
        let hasher = hasher();
        let at = |adapter_generation, weights| {
            hasher.root(&Context { adapter: Some(b"X"), adapter_generation, weights, ..Context::default() })
        };
        assert_ne!(at(0, 0), at(1, 0));
        assert_ne!(at(0, 0), at(0, 1));
        assert_ne!(at(0, 1), at(1, 0));
    }

    /// Case 24: another scope has other keys; case 23: one key for all tiers needs no tier in it.
    #[test]
    fn case_24_another_scope_has_other_keys() {
        let hasher = hasher();
        let root = hasher.root(&Context::default());
        let tokens = [7; 16];
        assert_eq!(hasher.page(A, root, &tokens), hasher.page(A, root, &tokens));
        assert_ne!(hasher.page(A, root, &tokens), hasher.page(B, root, &tokens));
        assert_ne!(hasher.caller(A, G, CallerKey::Int(5)), hasher.caller(B, G, CallerKey::Int(5)));
        assert_ne!(hasher.caller(A, G, CallerKey::Int(5)), hasher.caller(A, GroupId(1), CallerKey::Int(5)));
        let bytes = 5i128.to_le_bytes();
        assert_ne!(hasher.caller(A, G, CallerKey::Int(5)), hasher.caller(A, G, CallerKey::Bytes(&bytes)));
    }

    #[test]
    fn odd_pages_and_other_secrets() {
        let hasher = hasher();
        let root = hasher.root(&Context::default());
        assert_ne!(hasher.page(A, root, &[1, 2, 3]), hasher.page(A, root, &[1, 2, 3, 0]));
        let other = Hasher::new(Secret::from_bytes([9; 16]), false);
        assert_ne!(hasher.root(&Context::default()), other.root(&Context::default()));
        let one = Secret::random().expect("the system has randomness");
        assert!(one != Secret::random().expect("the system has randomness"));
    }

    #[test]
    fn index_keys_end_in_their_group_and_collide_on_request() {
        let hasher = hasher();
        let root = hasher.root(&Context::default());
        let page = hasher.page(A, root, &[1; 16]);
        for group in 0..=255 {
            assert_eq!(hasher.index_key(page, GroupId(group)) & GROUP_MASK, u64::from(group));
        }
        let forced = Hasher::new(Secret::from_bytes(*b"0123456789abcdef"), true);
        let (one, two) = (forced.page(A, root, &[1; 16]), forced.page(A, root, &[2; 16]));
        assert_eq!(forced.index_key(one, G), forced.index_key(two, G));
        assert_ne!(forced.index_key(one, G), forced.index_key(two, GroupId(1)));
        assert_ne!(forced.digest(one), forced.digest(two));
    }

    #[test]
    fn no_secret_is_shown() {
        let secret = Secret::from_bytes([0xab; 16]);
        let shown = format!("{secret:?} {:?}", Hasher::new(secret, false));
        assert_eq!(shown, "Secret(..) Hasher { secret: Secret(..), collide: false }");
    }
}
