//! Room in another tier or class: places for pages that are about to move there, charged to whom they are charged here.
//!
//! On the device such a charge is an allocation like any other: it takes cached pages that are in the way. The host tier has
//! no cached pages but those that were let go while they were away and could not end at once, because others continued them
//! or an order listed them ([`Pool::drop_lost_pages`]); they go before anything is refused. There a tenant's limit of the
//! host tier holds, and those above it.
//!
//! Callers: preempt.rs.

use crate::{
    error::{Refusal, Why},
    ledger::ROOT,
    plan::Move,
    pool::{ClassInfo, Pool, Scratch},
    sync::Atom,
    word::{ClassId, FrameId, Lane, PageRef, TenantId, Tier, Units, page::Location},
};

/// Bytes that somebody pays for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    pub(crate) payer: TenantId,
    pub(crate) bytes: u64,
}

/// So many bytes more of a payer.
pub(super) fn add_part(parts: &mut Vec<Part>, more: Part) {
    match parts.iter_mut().find(|part| part.payer == more.payer) {
        Some(part) => part.bytes += more.bytes,
        None => parts.push(more),
    }
}

impl Pool {
    /// Moves of a plan that will not be: the last first, as their pages go when everybody lets go of them.
    pub(super) fn undo(&self, lane: Lane, moves: &[Move]) {
        for m in moves.iter().rev() {
            self.end_move(lane, m, false);
        }
    }

    /// Places in `tier`, of the class that `to` says for theirs, for pages that were leased out: all or none. The moves are in the order of `leased`; the places are
    /// given out in that of where the pages lie, so that what lies side by side stays side by side.
    pub(super) fn destinations(
        &self,
        lane: Lane,
        tier: Tier,
        leased: &[(PageRef, Location)],
        to: impl Fn(ClassId) -> ClassId,
    ) -> Result<Vec<Move>, Refusal> {
        let key = |at: usize| (self.pages.payer(leased[at].0.id), leased[at].1.class());
        let moves = |places: &[Location]| -> Vec<Move> {
            let move_to = |(at, &to): (usize, &Location)| {
                let (page, from) = leased[at];
                Move { page, from, to, payer: self.pages.payer(page.id) }
            };
            places.iter().enumerate().map(move_to).collect()
        };
        let mut order: Vec<usize> = (0..leased.len()).collect();
        order.sort_unstable_by_key(|&at| (key(at), leased[at].1.frame()));
        let mut places = vec![Location::NOWHERE; leased.len()];
        for run in order.chunk_by(|&a, &b| key(a) == key(b)) {
            let (payer, class) = key(run[0]);
            let class = to(class);
            let mut frames = Vec::with_capacity(run.len());
            if let Err(refusal) = self.take_frames(lane, tier, payer, class, run.len(), &mut frames) {
                for m in moves(&places).iter().rev() {
                    match m.to.tier() {
                        Some(_) => _ = self.end_move(lane, m, false),
                        None => self.stay(lane, m.page),
                    }
                }
                return Err(refusal);
            }
            frames.sort_unstable();
            for (&at, frame) in run.iter().zip(frames) {
                places[at] = Location::new(tier, class, frame);
            }
        }
        Ok(moves(&places))
    }

    /// Places for `n` pages of a class that are to move to `tier`, charged to `payer`: all or none, behind those in `out`.
    pub(crate) fn take_frames(
        &self,
        lane: Lane,
        tier: Tier,
        payer: TenantId,
        class: ClassId,
        n: usize,
        out: &mut Vec<FrameId>,
    ) -> Result<(), Refusal> {
        let ClassInfo { size, units, .. } = self.classes[class.as_usize()];
        // As many as there are pages, so their units fit.
        let total = n as u32 * units;
        let mut scratch = Scratch::default();
        if tier == Tier::Device {
            if let Err(refusal) = self.charge(lane, payer, total, size, &mut scratch) {
                self.unclaim(size, &mut scratch);
                return Err(refusal);
            }
            if let Err(refusal) = self.claim(lane, payer, size, n, &mut scratch) {
                self.ledger.discharge(tier, payer, lane, Units(total));
                return Err(refusal);
            }
            // The pages have their ids.
            let _ = self.slots.release_many(&scratch.ids);
            out.append(&mut scratch.frames);
            return Ok(());
        }
        let lost = || self.drop_lost_pages(lane) > 0;
        while let Err(refused) = self.ledger.charge(tier, payer, lane, Units(total)) {
            if !lost() {
                return Err(self.refusal(refused));
            }
        }
        let start = out.len();
        loop {
            let got = out.len() - start;
            self.arena(tier).claim(size, lane, n - got, out);
            if out.len() - start == n {
                return Ok(());
            }
            if !lost() && self.quiescence.drain(&self.arenas) == 0 {
                break;
            }
        }
        let (asked, room) = (n as u64 * self.bytes(units), self.arena(tier).free_bytes());
        let _ = self.arena(tier).release_many(size, &out[start..]);
        out.truncate(start);
        self.ledger.discharge(tier, payer, lane, Units(total));
        let why = if room >= asked { Why::Fragmented } else { Why::Frames };
        Err(Refusal { why, tier, tenant: payer, level: TenantId(0), asked, room })
    }

    /// Whether the host tier has room for so many bytes of each payer at this moment, beside what `sent` says. What is lost
    /// there counts as room, as far as can be told without a look at each: some of it may have to stay for others that
    /// continue it.
    pub(super) fn check_host(&self, wanted: &[Part], sent: &[Part]) -> Result<(), Refusal> {
        let below = |level, parts: &[Part]| -> u64 {
            parts.iter().filter(|part| self.ledger.is_under(part.payer, level)).map(|part| part.bytes).sum()
        };
        let mut refusal =
            Refusal { why: Why::Frames, tier: Tier::Host, tenant: ROOT, level: ROOT, asked: 0, room: 0 };
        for part in wanted {
            // What one pays counts at those above it too.
            for level in std::iter::successors(Some(part.payer), |&at| self.ledger.parent(at)) {
                let (asked, before) = (below(level, wanted), below(level, sent));
                let units = Units(u32::try_from((asked + before) / self.spec.unit()).unwrap_or(u32::MAX));
                let room = self.ledger.room(Tier::Host, level, units);
                if room.now < units {
                    refusal.why = if room.level == ROOT { Why::Claim } else { Why::Limit };
                    let room_left = self.bytes(room.now.0).saturating_sub(before);
                    return Err(Refusal {
                        tenant: part.payer,
                        level: room.level,
                        asked,
                        room: room_left,
                        ..refusal
                    });
                }
                (refusal.tenant, refusal.asked) = (part.payer, asked);
            }
        }
        let before = below(ROOT, sent);
        let mut free = self.arena(Tier::Host).free_bytes();
        if free < refusal.asked + before && self.lost.get() > 0 {
            free += self.bytes(self.ledger.subtree_usage(Tier::Host, ROOT).cached.0);
        }
        refusal.room = free.saturating_sub(before);
        if refusal.room < refusal.asked { Err(refusal) } else { Ok(()) }
    }
}
