//! Room in another tier or class: places for pages that are about to move there, charged to whom they are charged here.
//!
//! On the device such a charge is an allocation like any other: it takes cached pages that are in the way. The host tier has
//! no cached pages but those that were let go while they were away and could not end at once, because others continued them
//! or an order listed them ([`Pool::drop_lost_pages`]); they go before anything is refused. There a tenant's limit of the
//! host tier holds, and those above it.
//!
//! Before a row is taken, and in a dry run, nothing is claimed there: [`Pool::check_host`] says what would fit, all together.
//! (Where extent 0 is partly reserved and there are several page sizes it may say yes to one extent too many.)
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

    /// Whether the host tier has room for pages at this moment, all together: in what each payer may be charged, and in frames of
    /// their sizes. With `lost`, what is lost there counts as room, as far as can be told without a look at each: some of it may
    /// have to stay for others that continue it, or lie where it serves other sizes.
    pub(super) fn check_host(&self, away: &Away, lost: bool) -> Result<(), Refusal> {
        self.ledger.fit(Tier::Host, &away.charges, lost).map_err(|refused| self.refusal(refused))?;
        let arena = self.arena(Tier::Host);
        if arena.fits(&away.frames) {
            return Ok(());
        }
        let asked: u64 = away.charges.iter().map(|c| self.bytes(c.1.0)).sum();
        let free = arena.free_bytes();
        if lost
            && self.lost.get() > 0
            && free + self.bytes(self.ledger.subtree_usage(Tier::Host, ROOT).cached.0) >= asked
        {
            return Ok(());
        }
        let tenant = away.charges.first().map_or(ROOT, |c| c.0);
        let why = if free >= asked { Why::Fragmented } else { Why::Frames };
        Err(Refusal { why, tier: Tier::Host, tenant, level: ROOT, asked, room: free })
    }
}

/// Pages that are to go to the host tier.
#[derive(Clone, Debug, Default)]
pub(super) struct Away {
    /// What each payer is charged there.
    charges: Vec<(TenantId, Units)>,
    /// How many, by size.
    frames: Vec<u64>,
}

impl Away {
    pub(super) fn add(&mut self, payer: TenantId, ClassInfo { size, units, .. }: ClassInfo) {
        match self.charges.iter_mut().find(|c| c.0 == payer) {
            Some((_, sum)) => sum.0 = sum.0.saturating_add(units),
            None => self.charges.push((payer, Units(units))),
        }
        if self.frames.len() <= size.as_usize() {
            self.frames.resize(size.as_usize() + 1, 0);
        }
        self.frames[size.as_usize()] += 1;
    }
}
