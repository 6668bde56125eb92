use super::*;

const A: TenantId = TenantId(1);
const B: TenantId = TenantId(2);

fn pages(n: u64) -> Vec<PageRef> {
    (0..n).map(PageRef::from_bits).collect()
}

fn add(pins: &Pins, owner: TenantId, units: u32, expires_at_ms: Option<u64>) -> Result<PinId, PinError> {
    pins.add(owner, Units(10), &pages(u64::from(units)), Units(units), expires_at_ms, "prompt")
}

#[test]
fn a_budget_is_kept_per_owner() {
    let pins = Pins::new();
    let first = add(&pins, A, 6, None).expect("fits");
    let refused = add(&pins, A, 5, None).expect_err("11 of 10");
    assert_eq!(refused, PinError { owner: A, budget: Units(10), used: Units(6), asked: Units(5) });
    assert_eq!(
        refused.to_string(),
        "a pin of 5 units does not fit: tenant T1 uses 6 of its pin budget of 10; unpin something, wait for a pin to \
         expire, or raise pin_budget"
    );
    add(&pins, B, 10, None).expect("another's budget");
    add(&pins, A, 4, None).expect("exactly full");
    assert_eq!((pins.used(A), pins.used(B), pins.len()), (Units(10), Units(10), 3));
    pins.take(first).expect("pinned");
    assert_eq!(pins.used(A), Units(4));
    // A budget lowered below use ends nothing; it refuses.
    assert!(pins.add(A, Units(3), &[], Units(0), None, "").is_err());
    // Sums don't wrap.
    assert!(pins.add(A, Units(u32::MAX), &[], Units(u32::MAX), None, "").is_err());
}

#[test]
fn the_second_unpin_is_an_answer() {
    let pins = Pins::new();
    let id = add(&pins, A, 2, Some(50)).expect("fits");
    let pin = pins.take(id).expect("pinned");
    assert_eq!((pin.owner, pin.pages.len(), pin.units, pin.label.as_str()), (A, 2, Units(2), "prompt"));
    assert_eq!(pins.take(id), Err(NotPinned::Ended(id)));
    assert!(pins.take_expired(100).is_empty());
    for never in [PinId(0), PinId(id.0 + 1), PinId(u64::MAX)] {
        assert_eq!(pins.take(never), Err(NotPinned::Unknown(never)));
    }
    assert_eq!((pins.used(A), pins.len()), (Units(0), 0));
    let next = add(&pins, A, 2, None).expect("fits");
    assert_ne!(next, id, "numbers are not used again");
}

#[test]
fn time_ends_pins_in_order() {
    let pins = Pins::new();
    let late = add(&pins, A, 1, Some(30)).expect("fits");
    let early = add(&pins, B, 1, Some(10)).expect("fits");
    let never = add(&pins, A, 1, None).expect("fits");
    let same = add(&pins, A, 1, Some(30)).expect("fits");
    let at = |now| pins.take_expired(now).into_iter().map(|pin| pin.id).collect::<Vec<_>>();
    assert_eq!(at(9), []);
    assert_eq!(at(10), [early]);
    assert_eq!(at(10), []);
    assert_eq!(at(u64::MAX - 1), [late, same]);
    assert_eq!(pins.list(None).iter().map(|pin| pin.id).collect::<Vec<_>>(), [never]);
    assert_eq!(pins.take(late), Err(NotPinned::Ended(late)));
}

#[test]
fn an_owner_lists_and_loses_its_own() {
    let pins = Pins::new();
    let mine: Vec<_> = (0..3).map(|_| add(&pins, A, 1, Some(5)).expect("fits")).collect();
    let other = add(&pins, B, 1, Some(7)).expect("fits");
    assert_eq!(pins.list(Some(A)).iter().map(|pin| pin.id).collect::<Vec<_>>(), mine);
    assert_eq!(pins.take_all(Some(A)).len(), 3);
    assert!(pins.list(Some(A)).is_empty());
    assert!(pins.take_expired(6).is_empty());
    assert_eq!(pins.take_all(None).iter().map(|pin| pin.id).collect::<Vec<_>>(), [other]);
    assert_eq!(pins.len(), 0);
}

#[test]
fn a_step_does_not_wait_for_the_table() {
    let pins = Pins::new();
    add(&pins, A, 1, Some(5)).expect("fits");
    let held = pins.lock();
    assert!(pins.take_expired(9).is_empty());
    drop(held);
    assert_eq!(pins.take_expired(9).len(), 1);
}
