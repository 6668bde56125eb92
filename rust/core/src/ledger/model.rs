//! The ledger against an obviously right model: every number after every operation, and every refusal.
//!
//! The model keeps what each node has and computes everything else from scratch. It knows nothing of stocks: what lies in
//! stock must never cause a refusal, and is subtracted where the ledger's numbers include it. Each tier has a model of its
//! own, so that what happens in one shows in the other nowhere.

use proptest::prelude::*;

use super::*;

const NODES: usize = 7;
/// Root; two orgs; two users below each.
const PARENT: [usize; NODES] = [0, 0, 0, 1, 1, 2, 2];
const CAPACITY: u32 = 60;
/// With the larger scale there is so much room that stocks are filled, and amounts that differ so much that few are.
const SCALES: [u32; 2] = [1, 20];

#[derive(Clone, Copy, Default, Debug)]
struct Node {
    held: u32,
    cached: u32,
    pinned: u32,
    promised: u32,
    reserve: u32,
    limit: Option<u32>,
    lend: bool,
    /// What was asked back of a reserve that is lent.
    asked_back: u32,
}

impl Node {
    fn hard(&self) -> u32 {
        self.held + self.pinned + self.promised
    }
    fn kept(&self) -> u32 {
        if self.lend { self.asked_back } else { self.reserve }
    }
}

#[derive(Clone, Debug)]
struct Model {
    nodes: [Node; NODES],
    capacity: u32,
}

/// (level, why, what would be granted)
type Refusal = (usize, Why, u32);

impl Model {
    fn path(at: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(at), |&at| (at != 0).then(|| PARENT[at]))
    }
    fn limit(&self, at: usize) -> u32 {
        if at == 0 { self.capacity } else { self.nodes[at].limit.unwrap_or(u32::MAX) }
    }
    fn children(at: usize) -> impl Iterator<Item = usize> {
        (1..NODES).filter(move |&child| PARENT[child] == at)
    }
    fn charged(&self, at: usize) -> u32 {
        let own = self.nodes[at].hard() + self.nodes[at].cached;
        own + Self::children(at).map(|child| self.charged(child)).sum::<u32>()
    }
    fn demand(&self, at: usize) -> u32 {
        self.nodes[at].hard() + Self::children(at).map(|child| self.claim(child)).sum::<u32>()
    }
    fn claim(&self, at: usize) -> u32 {
        self.demand(at).max(self.nodes[at].kept())
    }
    fn floor(&self, at: usize) -> u32 {
        Self::children(at).map(|child| self.floor(child)).sum::<u32>().max(self.nodes[at].reserve)
    }

    fn fits_limits(&self, at: usize, n: u32) -> Result<(), Refusal> {
        for level in Self::path(at) {
            let room = self.limit(level).saturating_sub(self.charged(level));
            if n > room {
                return Err((level, Why::Limit, room));
            }
        }
        Ok(())
    }

    /// Whether the claims of `after` are allowed, coming from these.
    fn fits_claims(&self, after: &Self, at: usize, n: u32) -> Result<(), Refusal> {
        for level in Self::path(at) {
            let (old, new) = (self.claim(level), after.claim(level));
            if new > old && new > self.limit(level) {
                let short = (new - self.limit(level)).min(new - old);
                return Err((level, Why::Claim, n - short.min(n)));
            }
        }
        Ok(())
    }

    fn step(&mut self, at: usize, limits: u32, f: impl Fn(&mut Node), n: u32) -> Result<(), Refusal> {
        if limits > 0 {
            self.fits_limits(at, limits)?;
        }
        let mut after = self.clone();
        f(&mut after.nodes[at]);
        self.fits_claims(&after, at, n)?;
        *self = after;
        Ok(())
    }

    /// What is granted whatever is in use, lent or not, never adds up to more than there is.
    fn check_floors(&self) {
        for at in 0..NODES {
            let reserves: u32 = Self::children(at).map(|child| self.floor(child)).sum();
            assert!(reserves <= self.limit(at), "node {at}");
        }
    }

    /// The most of its reserve that a node can keep, of `kept`.
    fn recall(&mut self, at: usize, kept: u32) -> Result<(), ()> {
        let asked = kept.min(self.nodes[at].reserve);
        if !self.nodes[at].lend || asked <= self.nodes[at].asked_back {
            return Ok(());
        }
        let fits = |asked_back| {
            let mut after = self.clone();
            after.nodes[at].asked_back = asked_back;
            self.fits_claims(&after, at, asked_back).is_ok().then_some(after)
        };
        let (most, after) = (self.nodes[at].asked_back..=asked)
            .rev()
            .find_map(|kept| fits(kept).map(|after| (kept, after)))
            .expect("nothing changes");
        *self = after;
        if most == asked { Ok(()) } else { Err(()) }
    }

    /// The most that could be charged once nothing is cached.
    fn room(&self, at: usize) -> u32 {
        let mut empty = self.clone();
        empty.nodes.iter_mut().for_each(|node| node.cached = 0);
        let fits = |n| empty.clone().step(at, n, |node| node.held += n, n).is_ok();
        let (mut most, mut more) = (0, self.capacity + 1);
        while more - most > 1 {
            let n = most.midpoint(more);
            if fits(n) { most = n } else { more = n }
        }
        most
    }
}

#[derive(Clone, Debug)]
enum Op {
    Charge(usize, u32, u8),
    Discharge(usize, u32, u8),
    Promise(usize, u32, u8),
    ChargePromised(usize, u32, u8),
    DischargePromised(usize, u32, u8),
    Unpromise(usize, u32, u8),
    Park(usize, u32),
    Revive(usize, u32),
    DropCached(usize, u32),
    ToPinned(usize, u32),
    FromPinned(usize, u32),
    ParkPinned(usize, u32),
    RevivePinned(usize, u32),
    Policy(usize, u32, Option<u32>, bool, Option<u32>),
    Shift(usize, i32),
    Recall(usize, u32),
    Lend(usize, u32),
    Capacity(u32),
    Drain,
}

fn op() -> impl Strategy<Value = Op> {
    let (at, n, lane) = (0..NODES, 0..12u32, 0..3u8);
    let three = (at.clone(), n.clone(), lane);
    let two = (at, n);
    let small = prop_oneof![Just(0), 0..40u32];
    let limit = prop_oneof![2 => Just(None), 3 => (0..70u32).prop_map(Some)];
    prop_oneof![
        8 => three.clone().prop_map(|(t, n, l)| Op::Charge(t, n, l)),
        4 => three.clone().prop_map(|(t, n, l)| Op::Discharge(t, n, l)),
        3 => three.clone().prop_map(|(t, n, l)| Op::Promise(t, n, l)),
        2 => three.clone().prop_map(|(t, n, l)| Op::ChargePromised(t, n, l)),
        1 => three.clone().prop_map(|(t, n, l)| Op::DischargePromised(t, n, l)),
        1 => three.prop_map(|(t, n, l)| Op::Unpromise(t, n, l)),
        3 => two.clone().prop_map(|(t, n)| Op::Park(t, n)),
        2 => two.clone().prop_map(|(t, n)| Op::Revive(t, n)),
        2 => two.clone().prop_map(|(t, n)| Op::DropCached(t, n)),
        1 => two.clone().prop_map(|(t, n)| Op::ToPinned(t, n)),
        1 => two.clone().prop_map(|(t, n)| Op::FromPinned(t, n)),
        1 => two.clone().prop_map(|(t, n)| Op::ParkPinned(t, n)),
        1 => two.prop_map(|(t, n)| Op::RevivePinned(t, n)),
        3 => (1..NODES, small, limit.clone(), any::<bool>(), limit)
            .prop_map(|(t, r, limit, lend, host)| Op::Policy(t, r, limit, lend, host)),
        1 => (1..NODES, -20..20i32).prop_map(|(t, by)| Op::Shift(t, by)),
        2 => (1..NODES, 0..40u32).prop_map(|(t, n)| Op::Recall(t, n)),
        1 => (1..NODES, 0..20u32).prop_map(|(t, n)| Op::Lend(t, n)),
        1 => (30..80u32).prop_map(Op::Capacity),
        1 => Just(Op::Drain),
    ]
}

struct Pair {
    models: [Model; TIERS],
    ledger: Ledger,
    scale: u32,
}

const DEV: Tier = Tier::Device;

fn id(at: usize) -> TenantId {
    TenantId(at as u32)
}

impl Pair {
    fn new(stock: u32, scale: u32) -> Self {
        let model = Model { nodes: [Node::default(); NODES], capacity: CAPACITY * scale };
        let capacity = [Units(CAPACITY * scale); 2];
        let ledger = Ledger::new(capacity, NODES as u32, Units(stock)).expect("small");
        for (at, &parent) in PARENT.iter().enumerate().skip(1) {
            let made = ledger.create(id(parent), &format!("t{at}"), &Policy::default());
            assert_eq!(made, Ok(id(at)));
        }
        Self { models: [model.clone(), model], ledger, scale }
    }

    fn compare(ours: Result<(), Refused>, right: Result<(), Refusal>) {
        let ours = ours.map_err(|refused| (refused.level.as_usize(), refused.why, refused.room.0));
        assert_eq!(ours, right);
    }

    /// Reserves are of the device, and so is what changes them.
    fn run(&mut self, tier: Tier, op: &Op) {
        let Self { models, ledger, scale } = self;
        let tier = match op {
            Op::Policy(..) | Op::Shift(..) | Op::Recall(..) | Op::Lend(..) => DEV,
            _ => tier,
        };
        let model = &mut models[tier.as_usize()];
        let size = |n: u32| if n.is_multiple_of(2) { n * *scale } else { n };
        let lane = |l: u8| Lane::wrapped(l.into());
        match *op {
            Op::Charge(t, n, l) => {
                let n = size(n);
                let right = model.step(t, n, |node| node.held += n, n);
                Self::compare(ledger.charge(tier, id(t), lane(l), Units(n)), right);
            }
            Op::Promise(t, n, l) => {
                let n = size(n);
                let right = model.step(t, n, |node| node.promised += n, n);
                Self::compare(ledger.promise(tier, id(t), lane(l), Units(n)), right);
            }
            Op::Revive(t, n) => {
                let n = size(n).min(model.nodes[t].cached);
                let change = |node: &mut Node| (node.cached, node.held) = (node.cached - n, node.held + n);
                let right = model.step(t, 0, change, n);
                Self::compare(ledger.revive(tier, id(t), Units(n)), right);
            }
            Op::RevivePinned(t, n) => {
                let n = size(n).min(model.nodes[t].cached);
                let change =
                    |node: &mut Node| (node.cached, node.pinned) = (node.cached - n, node.pinned + n);
                let right = model.step(t, 0, change, n);
                Self::compare(ledger.revive_pinned(tier, id(t), Units(n)), right);
            }
            Op::Discharge(t, n, l) => {
                let n = size(n).min(model.nodes[t].held);
                model.nodes[t].held -= n;
                ledger.discharge(tier, id(t), lane(l), Units(n));
            }
            Op::ChargePromised(t, n, l) => {
                let n = size(n).min(model.nodes[t].promised);
                (model.nodes[t].promised, model.nodes[t].held) =
                    (model.nodes[t].promised - n, model.nodes[t].held + n);
                ledger.charge_promised(tier, id(t), lane(l), Units(n));
            }
            Op::DischargePromised(t, n, l) => {
                let n = size(n).min(model.nodes[t].held);
                (model.nodes[t].promised, model.nodes[t].held) =
                    (model.nodes[t].promised + n, model.nodes[t].held - n);
                ledger.discharge_promised(tier, id(t), lane(l), Units(n));
            }
            Op::Unpromise(t, n, l) => {
                let n = size(n).min(model.nodes[t].promised);
                model.nodes[t].promised -= n;
                ledger.unpromise(tier, id(t), lane(l), Units(n));
            }
            Op::Park(t, n) => {
                let n = size(n).min(model.nodes[t].held);
                (model.nodes[t].held, model.nodes[t].cached) =
                    (model.nodes[t].held - n, model.nodes[t].cached + n);
                ledger.park(tier, id(t), Units(n));
            }
            Op::DropCached(t, n) => {
                let n = size(n).min(model.nodes[t].cached);
                model.nodes[t].cached -= n;
                ledger.drop_cached(tier, id(t), Units(n));
            }
            Op::ToPinned(t, n) => {
                let n = size(n).min(model.nodes[t].held);
                (model.nodes[t].held, model.nodes[t].pinned) =
                    (model.nodes[t].held - n, model.nodes[t].pinned + n);
                ledger.to_pinned(tier, id(t), Units(n));
            }
            Op::FromPinned(t, n) => {
                let n = size(n).min(model.nodes[t].pinned);
                (model.nodes[t].held, model.nodes[t].pinned) =
                    (model.nodes[t].held + n, model.nodes[t].pinned - n);
                ledger.from_pinned(tier, id(t), Units(n));
            }
            Op::ParkPinned(t, n) => {
                let n = size(n).min(model.nodes[t].pinned);
                (model.nodes[t].cached, model.nodes[t].pinned) =
                    (model.nodes[t].cached + n, model.nodes[t].pinned - n);
                ledger.park_pinned(tier, id(t), Units(n));
            }
            Op::Policy(t, reserve, limit, lend, host) => {
                let (reserve, limit) = (reserve * *scale, limit.map(|n| n * *scale));
                let host = host.map(|n| n * *scale);
                let asked_back = if model.nodes[t].lend { model.nodes[t].asked_back } else { 0 };
                let policy = Policy {
                    reserve: [Units(reserve), Units(0)],
                    limit: [limit, host].map(|limit| limit.map(Units)),
                    lend,
                    ..Policy::default()
                };
                let ours = ledger.set_policy(id(t), &policy);
                let node =
                    Node { reserve, limit, lend, asked_back: asked_back.min(reserve), ..model.nodes[t] };
                if self.policy(t, node, ours) {
                    self.models[Tier::Host.as_usize()].nodes[t].limit = host;
                }
            }
            Op::Shift(t, by) => {
                let by = by * *scale as i32;
                let ours = ledger.shift_reserve(DEV, ledger.now(id(t)), by.into());
                let now = model.nodes[t];
                let reserve = now.reserve.saturating_add_signed(by);
                let back = if now.lend { now.asked_back } else { 0 };
                let asked_back = back.saturating_add_signed(by).min(reserve);
                self.policy(t, Node { reserve, asked_back, ..now }, ours);
            }
            Op::Recall(t, n) => {
                let n = n * *scale;
                let right = model.recall(t, n);
                assert_eq!(ledger.recall(DEV, ledger.now(id(t)), Units(n)).map_err(drop), right);
            }
            Op::Lend(t, n) => {
                let n = n * *scale;
                model.nodes[t].asked_back = model.nodes[t].asked_back.min(n);
                ledger.lend(DEV, ledger.now(id(t)), Units(n));
            }
            Op::Capacity(capacity) => {
                let capacity = capacity * *scale;
                let reserved: u32 = Model::children(0).map(|child| model.floor(child)).sum();
                let ours = ledger.set_capacity(tier, Units(capacity));
                assert_eq!(ours.is_ok(), capacity >= reserved);
                if ours.is_ok() {
                    model.capacity = capacity;
                }
            }
            Op::Drain => ledger.drain(tier),
        }
    }

    /// Another policy and what the ledger said of it: whether it holds. (Without reserves a limit always does.)
    fn policy(&mut self, t: usize, node: Node, ours: Result<(), LedgerError>) -> bool {
        let model = &mut self.models[DEV.as_usize()];
        let mut after = model.clone();
        after.nodes[t] = node;
        let reserve = node.reserve;
        let reserves: u32 = Model::children(t).map(|child| model.floor(child)).sum();
        let limit = after.limit(t);
        if limit < reserve || limit < reserves {
            assert!(matches!(
                ours,
                Err(LedgerError::LimitBelowReserve { .. } | LedgerError::LimitBelowReserves { .. })
            ));
            return false;
        }
        // The reserves of all must fit under every limit above; then the claim must, while its own limit is the larger one.
        let floors_fit = Model::path(t).skip(1).all(|level| {
            let sum: u32 = Model::children(level).map(|child| after.floor(child)).sum();
            let old: u32 = Model::children(level).map(|child| model.floor(child)).sum();
            sum <= model.limit(level) || sum <= old
        });
        let mut before = model.clone();
        before.nodes[t].limit = Some(limit.max(model.limit(t)));
        let claims_fit = before.fits_claims(&after, t, u32::MAX).is_ok();
        assert_eq!(ours.is_ok(), floors_fit && claims_fit, "{ours:?}");
        if ours.is_ok() {
            *model = after;
        }
        ours.is_ok()
    }

    /// Every number of every node.
    fn check(&self) {
        Tier::ALL.into_iter().for_each(|tier| self.check_tier(tier));
        assert_eq!(self.ledger.faults(), 0);
    }

    fn check_tier(&self, tier: Tier) {
        let (model, ledger) = (&self.models[tier.as_usize()], &self.ledger);
        model.check_floors();
        let usages: Vec<_> = (0..NODES).map(|at| ledger.usage(tier, id(at))).collect();
        let mut with_stocks = model.clone();
        for (node, usage) in with_stocks.nodes.iter_mut().zip(&usages) {
            node.held += usage.stock.0;
        }
        for (at, usage) in usages.iter().enumerate() {
            let node = &model.nodes[at];
            let own = (usage.held.0, usage.cached.0, usage.pinned.0, usage.promised.0);
            assert_eq!(own, (node.held, node.cached, node.pinned, node.promised), "node {at}");
            assert_eq!(usage.charged.0, node.hard() + node.cached + usage.stock.0, "node {at}");
            assert_eq!((usage.missing, usage.merged), (Units(0), false));
            assert_eq!(
                (usage.reserve.0, usage.limit.map_or(u32::MAX, |l| l.0)),
                (node.reserve, model.limit(at))
            );
            assert_eq!(usage.subtree.0, with_stocks.charged(at), "node {at}");
            assert_eq!(ledger.kept(tier, id(at)).0, node.kept(), "node {at}");
            assert_eq!((usage.claim.0, usage.demand.0), (with_stocks.claim(at), with_stocks.demand(at)));
        }
    }

    /// What fits together is what one could be charged after the other, once nothing is cached.
    fn check_fit(&self, tier: Tier) {
        let model = &self.models[tier.as_usize()];
        for one in 0..NODES {
            let half = model.room(one) / 2;
            let mut after = model.clone();
            after.nodes[one].held += half;
            for other in 0..NODES {
                let most = after.room(other);
                let fit = |n| self.ledger.fit(tier, &[(id(one), Units(half)), (id(other), Units(n))], true);
                assert_eq!(fit(most), Ok(()), "{half} of node {one} and {most} of node {other}");
                assert!(fit(most + 1).is_err(), "{half} of node {one} and {most} + 1 of node {other}");
            }
        }
    }

    /// What admission is told is what a charge gets once nothing is cached.
    fn check_room(&self, tier: Tier) {
        let model = &self.models[tier.as_usize()];
        for at in 0..NODES {
            let right = model.room(at);
            let room = self.ledger.room(tier, id(at), Units(u32::MAX));
            assert_eq!(room.now.0, right, "node {at}");
            let unreclaimed = Model::path(at).map(|l| model.limit(l).saturating_sub(model.charged(l)));
            let unreclaimed = unreclaimed.min().unwrap_or(0);
            assert_eq!(room.unreclaimed.0 > 0, room.now.0 > 0 && unreclaimed > 0, "node {at}");
            // Beside what is cached there is what can be charged at once.
            let (fit, most) =
                (|n| self.ledger.fit(tier, &[(id(at), Units(n))], false), right.min(unreclaimed));
            assert_eq!((fit(most), fit(most + 1).is_err()), (Ok(()), true), "{most} of node {at}");
        }
    }
}

proptest! {
    #[test]
    fn every_number_is_the_models(
        stock in 0..5u32,
        scale in prop::sample::select(&SCALES[..]),
        ops in prop::collection::vec((prop::sample::select(&Tier::ALL[..]), op()), 1..120),
    ) {
        let mut pair = Pair::new(stock, scale);
        for (tier, op) in &ops {
            pair.run(*tier, op);
            pair.check();
        }
        for tier in Tier::ALL {
            pair.check_room(tier);
            pair.check_fit(tier);
        }
        pair.check();
    }
}
