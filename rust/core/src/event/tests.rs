use std::{sync::atomic::AtomicBool, thread};

use super::*;

fn stored(n: u64) -> Event {
    Event::Stored {
        key: n.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        parent: (!n.is_multiple_of(3)).then_some(!n),
        page: PageRef::from_bits(n.rotate_left(17)),
        group: GroupId(n as u8),
        tenant: TenantId(n as u32),
        tokens: n as u32 & MAX_TOKENS,
        tier: if n.is_multiple_of(2) { Tier::Device } else { Tier::Host },
    }
}

fn removed(n: u64) -> Event {
    Event::Removed { key: !n, group: GroupId(n as u8), tenant: TenantId(n as u32), tier: Tier::Host }
}

fn drain(events: &Events, max: usize) -> (Vec<Record>, Drained) {
    let mut out = Vec::new();
    let drained = events.drain(max, 0, &mut out).expect("nobody else drains");
    (out, drained)
}

#[test]
fn words_carry_every_field() {
    for n in (0..64).map(|shift| u64::MAX >> shift) {
        for event in [stored(n), removed(n), Event::Cleared] {
            let words = pack(&event);
            assert!(words.iter().all(|word| word >> LAP_SHIFT == 0), "{event:?}");
            assert_eq!(words[0] & TAKEN, 0);
            assert_eq!(unpack(&words), event);
        }
    }
}

#[test]
fn comes_out_in_order_with_numbers() {
    let events = Events::new(8);
    events.publish(stored(0));
    events.publish_all(&[stored(1), removed(0), Event::Cleared]);
    let (first, drained) = drain(&events, 3);
    assert_eq!(drained, Drained { events: 3, lost: 0, next: 3, pending: false });
    let (rest, drained) = drain(&events, 3);
    assert_eq!(drained, Drained { events: 1, lost: 0, next: 4, pending: false });
    let all: Vec<_> = first.into_iter().chain(rest).collect();
    for (sequence, (record, event)) in
        all.iter().zip([stored(0), stored(1), removed(0), Event::Cleared]).enumerate()
    {
        assert_eq!(*record, Record { sequence: sequence as u64, event });
    }
    assert_eq!(drain(&events, 3).1, Drained { events: 0, lost: 0, next: 4, pending: false });
}

#[test]
fn a_full_ring_drops_the_oldest_and_counts() {
    let events = Events::new(4);
    for n in 0..11 {
        events.publish(stored(n));
    }
    assert_eq!(events.dropped(), 7);
    let (records, drained) = drain(&events, 100);
    assert_eq!(drained, Drained { events: 4, lost: 7, next: 11, pending: false });
    assert_eq!(records.iter().map(|r| r.sequence).collect::<Vec<_>>(), [7, 8, 9, 10]);
    assert_eq!((events.written(), events.delivered(), events.dropped()), (11, 4, 7));
    // What was taken is not dropped when it is overwritten.
    for n in 0..4 {
        events.publish(stored(n));
    }
    assert_eq!(events.dropped(), 7);
}

#[test]
fn one_ticket_for_more_than_the_ring_holds() {
    let events = Events::new(4);
    events.publish_all(&(0..10).map(stored).collect::<Vec<_>>());
    let (records, drained) = drain(&events, 100);
    assert_eq!(records.iter().map(|r| r.event).collect::<Vec<_>>(), (6..10).map(stored).collect::<Vec<_>>());
    assert_eq!((drained.lost, events.dropped()), (6, 6));
}

#[test]
fn off_without_capacity() {
    let events = Events::new(0);
    assert_eq!((events.is_on(), events.capacity()), (false, 0));
    events.publish(stored(1));
    events.turn(true);
    events.publish_all(&[stored(1)]);
    assert_eq!((events.written(), events.dropped()), (0, 0));
    assert_eq!(drain(&events, 9).1, Drained::default());
    assert_eq!(Events::new(5).capacity(), 8);
}

#[test]
fn a_second_consumer_is_told() {
    let events = Events::new(4);
    let claim = Claim::take(&events.hot[CLAIM]).expect("free");
    let busy = events.drain(1, 0, &mut Vec::new()).expect_err("claimed");
    assert!(busy.to_string().contains("another thread"));
    drop(claim);
    assert!(events.drain(1, 0, &mut Vec::new()).is_ok());
}

/// The steps of a producer that stops after taking its ticket, or after entering the slot.
fn ticket(events: &Events) -> u64 {
    events.hot[HEAD].plus(1)
}
fn enter(events: &Events, sequence: u64, event: &Event) {
    events.slot(sequence)[0].put(events.lap(sequence) | pack(event)[0]);
}
fn finish(events: &Events, sequence: u64, event: &Event) {
    for (word, payload) in events.slot(sequence).iter().zip(pack(event)).skip(1) {
        word.put(events.lap(sequence) | payload);
    }
}

#[test]
fn a_stopped_producer_is_waited_for_and_then_given_up() {
    for entered in [false, true] {
        let events = Events::new(16);
        events.publish(stored(0));
        // It stopped among three events; the wait is for all of them at once.
        let stopped = [ticket(&events), ticket(&events), ticket(&events)];
        if entered {
            enter(&events, stopped[0], &stored(1));
        }
        events.publish(stored(2));
        let mut out = Vec::new();
        let now = 5;
        let drained = events.drain(9, now, &mut out).expect("free");
        assert_eq!(drained, Drained { events: 1, lost: 0, next: 1, pending: true });
        let drained = events.drain(9, now + PATIENCE_MS - 1, &mut out).expect("free");
        assert_eq!(drained, Drained { events: 0, lost: 0, next: 1, pending: true });
        let drained = events.drain(9, now + PATIENCE_MS, &mut out).expect("free");
        assert_eq!(drained, Drained { events: 1, lost: 3, next: 5, pending: false });
        assert_eq!(out[1], Record { sequence: 4, event: stored(2) });
        // It wakes up: nothing is read twice, and all are counted once.
        for sequence in stopped {
            if entered && sequence == stopped[0] {
                finish(&events, sequence, &stored(1));
            } else {
                events.write(sequence, &stored(1));
            }
        }
        assert_eq!(drain(&events, 9).1.events, 0);
        assert_eq!((events.written(), events.delivered(), events.dropped()), (5, 2, 3));
    }
}

#[test]
fn patience_starts_anew_for_a_later_event() {
    let events = Events::new(16);
    ticket(&events);
    let mut out = Vec::new();
    assert!(events.drain(9, 0, &mut out).expect("free").pending);
    assert!(!events.drain(9, PATIENCE_MS, &mut out).expect("free").pending);
    ticket(&events);
    assert!(events.drain(9, 5 * PATIENCE_MS, &mut out).expect("free").pending);
    assert!(!events.drain(9, 6 * PATIENCE_MS, &mut out).expect("free").pending);
}

#[test]
fn half_a_ring_behind_it_is_patience_enough() {
    let events = Events::new(8);
    ticket(&events);
    for n in 1..4 {
        events.publish(stored(n));
    }
    assert!(drain(&events, 9).1.pending);
    events.publish(stored(4));
    let (records, drained) = drain(&events, 9);
    assert_eq!((records.len(), drained.lost, drained.pending), (4, 1, false));
}

#[test]
fn a_producer_a_lap_late_destroys_nothing_unseen() {
    // It stopped before it entered: it finds the slot overtaken.
    let events = Events::new(2);
    let late = ticket(&events);
    events.publish(stored(1));
    events.publish(stored(2));
    events.write(late, &stored(0));
    let (records, _) = drain(&events, 9);
    assert_eq!(records.iter().map(|r| r.event).collect::<Vec<_>>(), [stored(1), stored(2)]);
    assert_eq!((events.delivered(), events.dropped()), (2, 1));

    // It stopped between its word 0 and the rest: what it spoils reads as unfinished and is given up, never torn.
    let events = Events::new(2);
    let late = ticket(&events);
    enter(&events, late, &stored(0));
    events.publish(stored(1));
    events.publish(stored(2));
    finish(&events, late, &stored(0));
    let mut out = Vec::new();
    assert!(events.drain(9, 0, &mut out).expect("free").pending);
    assert!(!events.drain(9, PATIENCE_MS, &mut out).expect("free").pending);
    assert_eq!(out, [Record { sequence: 1, event: stored(1) }]);
    assert_eq!((events.written(), events.delivered(), events.dropped()), (3, 1, 2));
}

#[test]
fn laps_wrap() {
    let events = Events::new(2);
    // Two events before the lap number wraps to 0.
    let start = (u64::from(u32::MAX) - 1) * 2;
    events.hot[HEAD].put(start);
    events.hot[TAIL].put(start);
    for word in events.slots.iter().take(2 * SLOT) {
        word.put(u64::from(u32::MAX - 1) << LAP_SHIFT | CLEARED | TAKEN);
    }
    for n in 0..8 {
        events.publish(stored(n));
        let (records, drained) = drain(&events, 9);
        assert_eq!(records, [Record { sequence: start + n, event: stored(n) }]);
        assert_eq!(drained.lost, 0);
    }
    assert_eq!(events.dropped(), 0);
}

#[test]
fn many_producers_beside_a_consumer() {
    const PRODUCERS: u64 = 3;
    const EACH: u64 = 20_000;
    let events = Events::new(64);
    let done = AtomicBool::new(false);
    let (mut records, mut lost) = (Vec::new(), 0);
    thread::scope(|scope| {
        let producers: Vec<_> = (0..PRODUCERS)
            .map(|p| {
                let events = &events;
                scope.spawn(move || {
                    for n in 0..EACH {
                        events.publish(stored(p << 32 | n));
                    }
                })
            })
            .collect();
        let consumer = scope.spawn(|| {
            let (mut records, mut lost) = (Vec::new(), 0);
            loop {
                let last = done.load(std::sync::atomic::Ordering::Acquire);
                let drained = events.drain(50, 0, &mut records).expect("nobody else drains");
                lost += drained.lost;
                if last && drained.next == events.written() {
                    return (records, lost);
                }
            }
        });
        for producer in producers {
            producer.join().expect("the producer ends");
        }
        done.store(true, std::sync::atomic::Ordering::Release);
        (records, lost) = consumer.join().expect("the consumer ends");
    });
    assert_eq!(records.len() as u64 + lost, PRODUCERS * EACH);
    assert_eq!((events.delivered(), events.dropped()), (records.len() as u64, lost));
    // Each producer's events are whole and in its own order.
    let mut next = [0; PRODUCERS as usize];
    for record in records {
        let Event::Stored { page, .. } = record.event else { panic!("{record:?}") };
        let n = page.to_bits().rotate_right(17);
        assert_eq!(record.event, stored(n));
        let (producer, n) = ((n >> 32) as usize, n & PAYLOAD);
        assert!(n >= next[producer], "out of order");
        next[producer] = n + 1;
    }
}
