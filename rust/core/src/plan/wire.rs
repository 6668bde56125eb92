//! A plan as bytes, for those who carry it out elsewhere: every rank of a group copies its own shard.
//!
//! Eight-byte words, little endian: what it is and in which version, the numbers, the digest of the spec, the moves, the
//! victims, where the host tier was full, and a checksum of all before. What was altered on the way is refused; who may send one
//! is not decided here.
//!
//! The digest is the caller's: the books don't know the layers of the model, which the ranks of a group must agree on too.

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

use super::{Fate, Fault, Kind, Move, Plan, PlanId, Rungs, TakenRow, Victim};
use crate::word::{PageRef, TenantId, page::Location};

const MAGIC: u64 = u64::from_le_bytes(*b"kvplan\0\x02");
const WORDS: usize = 24;
const MOVE: usize = 4;
const VICTIM: usize = 6;
const UNKNOWN: u64 = u64::MAX;

fn checksum(bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher13::new();
    hasher.write(bytes);
    hasher.finish()
}

/// What tells a spec from others: whoever carries a plan out compares it with that of their own.
pub type SpecDigest = [u8; 16];

impl Plan {
    /// As bytes, with the digest of the pool's spec.
    pub fn to_bytes(&self, spec: SpecDigest) -> Vec<u8> {
        let Rungs { free, offload, compress, evict } = self.rungs;
        let mut words = vec![
            MAGIC,
            self.pool,
            self.id.0,
            self.kind as u64,
            self.tenant.0.into(),
            self.deadline_ms,
            self.asked,
            free,
            offload,
            compress,
            evict,
            self.shared,
            self.pinned,
            self.shortfall,
            self.emptied,
            self.copied[0],
            self.copied[1],
            self.copy_ns.unwrap_or(UNKNOWN),
            self.moves.len() as u64,
            self.victims.len() as u64,
            self.host_full.len() as u64,
        ];
        let spec = u128::from_le_bytes(spec);
        words.extend([spec as u64, (spec >> 64) as u64]);
        for m in &self.moves {
            words.extend([m.page.to_bits(), m.from.0, m.to.0, m.payer.0.into()]);
        }
        for v in &self.victims {
            let row = v.row.map_or(0, |TakenRow { row, moved }| {
                (u64::from(row) + 1) | (moved.map_or(0, |moved| u64::from(moved) + 1) << 32)
            });
            words.extend([v.sequence, v.tenant.0.into(), v.fate as u64, v.bytes, v.tokens.into(), row]);
        }
        words.extend(self.host_full.iter().map(|level| u64::from(level.0)));
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.extend(checksum(&bytes).to_le_bytes());
        bytes
    }

    /// What [`Self::to_bytes`] wrote: the plan, and the digest.
    ///
    /// # Errors
    /// Another version, or anything that was altered.
    pub fn from_bytes(bytes: &[u8]) -> Result<(Self, SpecDigest), Fault> {
        let (chunks, rest) = bytes.as_chunks::<8>();
        let words: Vec<u64> = chunks.iter().map(|&w| u64::from_le_bytes(w)).collect();
        if !rest.is_empty() || words.len() < WORDS {
            return Err(Fault::Altered("too few of them, or a broken word at the end"));
        }
        if words[0] & ((1 << 56) - 1) != MAGIC & ((1 << 56) - 1) {
            return Err(Fault::Altered("they don't begin as one"));
        }
        if words[0] != MAGIC {
            return Err(Fault::Altered("it is of another version"));
        }
        if checksum(&bytes[..bytes.len() - 8]) != words[words.len() - 1] {
            return Err(Fault::Altered("the checksum differs: something was altered on the way"));
        }
        // As it was written: what follows only guards against a writer of another mind.
        let (moves, victims, levels) = (words[18], words[19], words[20]);
        let length = moves.checked_mul(MOVE as u64).zip(victims.checked_mul(VICTIM as u64));
        let length = length.and_then(|(m, v)| m.checked_add(v)).and_then(|n| n.checked_add(levels));
        if length.and_then(|n| n.checked_add(WORDS as u64)) != Some(words.len() as u64) {
            return Err(Fault::Altered("its length is not that of its moves"));
        }
        let (moves, rest) = words[WORDS - 1..words.len() - 1].split_at(moves as usize * MOVE);
        let (victims, levels) = rest.split_at(victims as usize * VICTIM);
        let short = |word: u64| u32::try_from(word).map_err(|_| Fault::Altered("a number is too large"));
        let location = |word: u64| match Location(word) {
            at if at.tier().is_some() => Ok(at),
            _ => Err(Fault::Altered("a location is none")),
        };
        let each_move = |w: &[u64]| {
            Ok(Move {
                page: PageRef::from_bits(w[0]),
                from: location(w[1])?,
                to: location(w[2])?,
                payer: TenantId(short(w[3])?),
            })
        };
        let victim = |w: &[u64]| {
            let fate = usize::try_from(w[2]).ok().and_then(|fate| Fate::ALL.get(fate));
            Ok(Victim {
                sequence: w[0],
                tenant: TenantId(short(w[1])?),
                fate: *fate.ok_or(Fault::Altered("nobody knows what becomes of a sequence"))?,
                bytes: w[3],
                tokens: short(w[4])?,
                row: (w[5] as u32)
                    .checked_sub(1)
                    .map(|row| TakenRow { row, moved: ((w[5] >> 32) as u32).checked_sub(1) }),
            })
        };
        let kind = usize::try_from(words[3]).ok().and_then(|kind| Kind::ALL.get(kind));
        let spec = (u128::from(words[22]) << 64 | u128::from(words[21])).to_le_bytes();
        let plan = Self {
            pool: words[1],
            id: PlanId(words[2]),
            kind: *kind.ok_or(Fault::Altered("its kind is unknown"))?,
            tenant: TenantId(short(words[4])?),
            deadline_ms: words[5],
            asked: words[6],
            rungs: Rungs { free: words[7], offload: words[8], compress: words[9], evict: words[10] },
            shared: words[11],
            pinned: words[12],
            shortfall: words[13],
            host_full: levels.iter().map(|&level| short(level).map(TenantId)).collect::<Result<_, _>>()?,
            emptied: words[14],
            copied: [words[15], words[16]],
            copy_ns: Some(words[17]).filter(|&ns| ns != UNKNOWN),
            moves: moves.chunks(MOVE).map(each_move).collect::<Result<_, _>>()?,
            victims: victims.chunks(VICTIM).map(victim).collect::<Result<_, _>>()?,
        };
        Ok((plan, spec))
    }
}
