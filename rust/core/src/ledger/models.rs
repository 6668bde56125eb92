//! Loom models of the ledger's races, one tier at a time.

use loom::{sync::Arc, thread};

use super::{book::Book, tree::ROOT, usage::Usage};
use crate::word::{Lane, TenantId, Units, ledger::MetaWord};

const A: TenantId = TenantId(1);
const B: TenantId = TenantId(2);
const ONE: Units = Units(1);

/// A root and two tenants below it.
fn book(capacity: u32, stock: u32) -> Arc<Book> {
    let book = Book::new(3, Units(capacity), Units(stock));
    for tenant in [A, B] {
        book.tree.set_meta(tenant, MetaWord::new(ROOT, 1, 50));
        book.tree.set_limit(tenant, Units(u32::MAX));
        book.set_top(tenant.0);
    }
    Arc::new(book)
}

fn both(
    book: &Arc<Book>,
    f: impl FnOnce(&Book) -> bool + 'static,
    g: impl FnOnce(&Book) -> bool,
) -> (bool, bool) {
    let other = Arc::clone(book);
    let thread = thread::spawn(move || f(&other));
    let second = g(book);
    (thread.join().expect("no panic"), second)
}

fn charged(book: &Book, tenant: TenantId) -> u32 {
    book.tree.usage(tenant).charged().0
}

/// Root demand equals the children's claims, and charges add up; nothing is left in between.
fn at_rest(book: &Book) {
    let tree = &book.tree;
    assert_eq!(tree.claim(ROOT).demand().0, tree.claim(A).claim().0 + tree.claim(B).claim().0);
    assert_eq!(charged(book, ROOT), charged(book, A) + charged(book, B));
    for tenant in [A, B] {
        let own = tree.own(tenant);
        assert_eq!(charged(book, tenant) as i64, i64::from(own.hard()) + i64::from(own.cached()));
        assert_eq!(tree.claim(tenant).demand().0, own.hard());
    }
    assert_eq!(tree.faults(), 0);
}

#[test]
fn two_charges_at_a_limit_of_one() {
    loom::model(|| {
        let book = book(10, 0);
        book.tree.set_limit(A, ONE);
        let won = both(&book, |b| b.tree.obtain(A, ONE).is_ok(), |b| b.tree.obtain(A, ONE).is_ok());
        assert!(won.0 != won.1);
        assert_eq!(charged(&book, ROOT), 1);
        at_rest(&book);
    });
}

#[test]
fn two_charges_at_a_capacity_of_one() {
    loom::model(|| {
        let book = book(1, 0);
        let won = both(&book, |b| b.tree.obtain(A, ONE).is_ok(), |b| b.tree.obtain(B, ONE).is_ok());
        assert!(won.0 != won.1);
        at_rest(&book);
    });
}

#[test]
fn a_charge_against_a_reserve() {
    loom::model(|| {
        let book = book(1, 0);
        let won = both(&book, |b| b.tree.obtain(A, ONE).is_ok(), |b| b.tree.set_kept(B, ONE).is_ok());
        assert!(won.0 != won.1);
        assert_eq!(book.tree.claim(ROOT).claim(), ONE);
        at_rest(&book);
    });
}

#[test]
fn two_charges_across_the_reserve() {
    loom::model(|| {
        let book = book(10, 0);
        book.tree.set_kept(A, ONE).expect("room");
        let watch = |b: &Book| {
            let claim = b.tree.claim(A).claim();
            // Growth reaches the root first.
            assert!(b.tree.claim(ROOT).demand() >= claim);
            b.tree.obtain(A, ONE).is_ok()
        };
        assert_eq!(both(&book, watch, watch), (true, true));
        assert_eq!(book.tree.claim(ROOT).demand(), Units(2));
        at_rest(&book);
    });
}

#[test]
fn growth_against_shrinking_across_the_reserve() {
    loom::model(|| {
        let book = book(2, 0);
        book.tree.set_kept(A, ONE).expect("room");
        book.tree.obtain(A, ONE).expect("room");
        let give = |b: &Book| {
            b.tree.surrender(A, ONE);
            true
        };
        assert_eq!(both(&book, give, |b| b.tree.obtain(A, ONE).is_ok()), (true, true));
        assert_eq!((book.tree.claim(ROOT).demand(), charged(&book, ROOT)), (ONE, 1));
        at_rest(&book);
    });
}

/// While a reserve is being lowered its units are counted twice for a moment, so a charge beside it may be refused that
/// fits before and after. It never leaves a trace, and it never goes through wrongly.
#[test]
fn a_reserve_that_changes_under_a_charge() {
    loom::model(|| {
        let book = book(3, 0);
        book.tree.set_kept(A, Units(2)).expect("room");
        let lower = |b: &Book| b.tree.set_kept(A, Units(0)).is_ok();
        let (_, won) = both(&book, lower, |b| b.tree.obtain(A, Units(3)).is_ok());
        at_rest(&book);
        assert!(won || book.tree.obtain(A, Units(3)).is_ok());
        assert_eq!(book.tree.claim(ROOT).demand(), Units(3));
        at_rest(&book);
    });
}

#[test]
fn parking_makes_room_for_a_reserve() {
    loom::model(|| {
        let book = book(1, 0);
        book.tree.obtain(A, ONE).expect("room");
        let park = |b: &Book| {
            b.tree.park(A, ONE);
            // Whoever has reserved it keeps it.
            b.tree.revive(A, ONE).is_ok()
        };
        let (back, reserved) = both(&book, park, |b| b.tree.set_kept(B, ONE).is_ok());
        assert!(back != reserved);
        at_rest(&book);
    });
}

#[test]
fn a_stock_is_drawn_or_drained() {
    loom::model(|| {
        let book = book(1, 1);
        book.charge(A, Lane(0), ONE).expect("room");
        book.discharge(A, Lane(0), ONE);
        assert_eq!(charged(&book, ROOT), 1, "it lies in stock");
        let draw = |b: &Book| b.stocks.draw(A, Lane(0), ONE) || b.charge(A, Lane(0), ONE).is_ok();
        let won = both(&book, draw, |b| b.charge(B, Lane(0), ONE).is_ok());
        assert!(won.0 != won.1);
        book.drain(ROOT);
        assert_eq!(charged(&book, ROOT), 1);
        at_rest(&book);
    });
}

#[test]
fn a_discharge_is_found_by_whoever_asks_after_it() {
    loom::model(|| {
        let book = book(1, 1);
        book.charge(A, Lane(0), ONE).expect("room");
        let give = |b: &Book| {
            if !b.stocks.store(A, Lane(0), ONE) {
                b.discharge(A, Lane(0), ONE);
            }
            true
        };
        let (_, won) = both(&book, give, |b| b.charge(B, Lane(0), ONE).is_ok());
        // Refused only if the discharge came after.
        assert!(won || book.charge(B, Lane(0), ONE).is_ok());
        at_rest(&book);
    });
}

/// There is room for one at every moment, in one lane's stock or in another's: whoever asks for one gets it.
#[test]
fn units_that_hop_between_lanes_are_found() {
    loom::model(|| {
        let book = book(2, 1);
        book.tree.obtain(A, Units(2)).expect("room");
        book.stocks.fill(A, Lane(1), ONE);
        let hop = |b: &Book| {
            if !b.stocks.store(A, Lane(0), ONE) {
                b.discharge(A, Lane(0), ONE);
            }
            b.stocks.draw(A, Lane(1), ONE) || b.charge(A, Lane(1), ONE).is_ok()
        };
        assert_eq!(both(&book, hop, |b| b.charge(B, Lane(0), ONE).is_ok()), (true, true));
        at_rest(&book);
    });
}

/// Below a limit that was lowered under use nobody goes on with what he gave back.
#[test]
fn no_stock_is_left_below_a_lowered_limit() {
    loom::model(|| {
        let book = book(4, 1);
        book.tree.obtain(A, Units(3)).expect("room");
        let give = |b: &Book| {
            b.discharge(A, Lane(0), ONE);
            true
        };
        both(&book, give, |b| b.set_limit(A, ONE).0 > 0);
        assert!(!book.stocks.draw(A, Lane(0), ONE) && book.charge(A, Lane(0), ONE).is_err());
        assert_eq!(charged(&book, ROOT), 2);
        at_rest(&book);
    });
}

#[test]
fn listing_counts_each_lane_once() {
    loom::model(|| {
        let book = book(4, 1);
        book.tree.obtain(A, Units(2)).expect("room");
        let give = |b: &Book| {
            b.discharge(A, Lane(0), ONE);
            true
        };
        both(&book, give, |b| {
            b.discharge(A, Lane(0), ONE);
            b.drain(ROOT)
        });
        book.drain(ROOT);
        assert!(!book.drain(ROOT), "no lane is listed any more");
        assert_eq!(charged(&book, ROOT), 0);
        at_rest(&book);
    });
}

fn balanced(usage: &Usage) -> bool {
    let sum = usage.held.0 + usage.cached.0 + usage.pinned.0 + usage.promised.0 + usage.stock.0;
    sum == usage.charged.0 && usage.missing.0 == 0
}

#[test]
fn a_snapshot_beside_a_transfer_between_lanes() {
    loom::model(|| {
        let book = book(4, 1);
        book.tree.obtain(A, Units(2)).expect("room");
        book.stocks.fill(A, Lane(0), ONE);
        book.stocks.fill(A, Lane(1), Units(0));
        // One unit held, one in stock; it moves from lane 0 into use and into lane 1.
        let transfer = |b: &Book| {
            assert!(b.stocks.draw(A, Lane(0), ONE));
            assert!(b.stocks.store(A, Lane(1), ONE));
            true
        };
        both(&book, transfer, |b| {
            let usage = b.usage(A);
            assert!(balanced(&usage) && [1, 2].contains(&usage.held.0), "{usage:?}");
            true
        });
        assert_eq!(book.usage(A).held, ONE);
    });
}

#[test]
fn a_snapshot_beside_a_pin() {
    loom::model(|| {
        let book = book(4, 0);
        book.tree.obtain(A, Units(2)).expect("room");
        book.tree.park(A, ONE);
        let pin = |b: &Book| {
            b.tree.revive(A, ONE).expect("room");
            b.tree.count_pinned(A, 1);
            true
        };
        both(&book, pin, |b| {
            let usage = b.usage(A);
            // One held and one cached, both held, one held and one pinned.
            let seen = (usage.held.0, usage.cached.0, usage.pinned.0);
            assert!([(1, 1, 0), (2, 0, 0), (1, 0, 1)].contains(&seen), "{usage:?}");
            true
        });
    });
}

#[test]
fn closed_lanes_lose_nothing() {
    loom::model(|| {
        let book = book(4, 1);
        book.charge(A, Lane(0), ONE).expect("room");
        book.discharge(A, Lane(0), ONE);
        let work = |b: &Book| {
            if !b.stocks.draw(A, Lane(0), ONE) {
                b.charge(A, Lane(0), ONE).expect("room");
            }
            b.count_promised(A, Lane(0), 1);
            true
        };
        both(&book, work, |b| {
            b.stocks.set_closed(A, true);
            b.stocks.set_closed(A, false);
            true
        });
        let usage = book.usage(A);
        assert!(balanced(&usage) && usage.promised == ONE && usage.held == Units(0), "{usage:?}");
        at_rest(&book);
    });
}

/// A lender asks back what a borrower charges at that moment: one of them gets it, and the lender keeps what is left.
#[test]
fn a_recall_against_a_borrower() {
    loom::model(|| {
        let book = book(2, 0);
        // Both are lent: nothing is kept.
        book.tree.set_floor(A, Units(2), true);
        let recalled = |b: &Book| b.tree.set_kept(A, Units(2)).is_ok();
        let (kept, borrowed) = both(&book, recalled, |b| b.tree.obtain(B, ONE).is_ok());
        assert!(kept != borrowed);
        assert_eq!(book.tree.claim(A).kept(), if kept { Units(2) } else { Units(0) });
        at_rest(&book);
        if borrowed {
            book.tree.surrender(B, ONE);
            book.tree.set_kept(A, Units(2)).expect("it came back");
        }
        book.tree.obtain(A, Units(2)).expect("its reserve");
        at_rest(&book);
    });
}

/// What a lender uses and lends at one moment is never counted too low.
#[test]
fn a_charge_of_the_lender_while_it_lends() {
    loom::model(|| {
        let book = book(2, 0);
        book.tree.set_kept(A, Units(2)).expect("room");
        let lend = |b: &Book| b.tree.set_kept(A, Units(0)).is_ok();
        let (lent, charged) = both(&book, lend, |b| b.tree.obtain(A, ONE).is_ok());
        at_rest(&book);
        // As under any reserve that is lowered: refused without a trace, or charged.
        assert!(lent && (charged || book.tree.obtain(A, ONE).is_ok()));
        assert_eq!(book.tree.claim(ROOT).demand(), ONE);
        at_rest(&book);
        book.tree.obtain(B, ONE).expect("the rest is lent");
        at_rest(&book);
    });
}
