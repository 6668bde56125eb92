//! Every interleaving of two producers and a consumer on rings of one and two slots.
//!
//! Run with `RUSTFLAGS="--cfg kvalloc_loom" LOOM_MAX_PREEMPTIONS=2 cargo test -p kvalloc-core --lib --release models`.

use super::{Event, Events, PATIENCE_MS, Record};
use crate::{
    sync::Arc,
    word::{GroupId, PageRef, TenantId, Tier},
};
use loom::thread;

/// An event all of whose words tell who made it.
fn stored(n: u64) -> Event {
    let word = n << 32 | n;
    Event::Stored {
        key: word,
        parent: Some(word),
        page: PageRef::from_bits(word),
        group: GroupId(n as u8),
        tenant: TenantId(n as u32),
        tokens: n as u32,
        tier: Tier::Device,
    }
}

fn assert_whole(records: &[Record], made: &[u64]) {
    for record in records {
        assert!(made.iter().any(|&n| record.event == stored(n)), "torn: {record:?}");
    }
    for pair in records.windows(2) {
        assert!(pair[0].sequence < pair[1].sequence, "order: {pair:?}");
        assert_ne!(pair[0].event, pair[1].event, "twice: {pair:?}");
    }
}

/// At rest every ticket has ended once.
fn settle(events: &Events, records: &mut Vec<Record>, now: u64) {
    while events.drain(8, now + PATIENCE_MS, records).expect("nobody else drains").pending {}
    assert_eq!(events.delivered(), records.len() as u64);
    assert_eq!(events.written(), events.delivered() + events.dropped());
}

/// The producer of the next lap overtakes while the consumer reads: the event is whole or lost, and counted.
#[test]
fn overtaken_while_read() {
    loom::model(|| {
        let events = Arc::new(Events::new(1));
        events.publish(stored(1));
        let producer = {
            let events = events.clone();
            thread::spawn(move || events.publish(stored(2)))
        };
        let mut records = Vec::new();
        let drained = events.drain(8, 0, &mut records).expect("nobody else drains");
        assert_eq!(drained.next, drained.events + drained.lost);
        producer.join().expect("the producer ends");
        settle(&events, &mut records, 0);
        assert_whole(&records, &[1, 2]);
    });
}

/// Two producers a lap apart in one slot, whoever is late, beside the consumer.
#[test]
fn two_producers_in_one_slot() {
    loom::model(|| {
        let events = Arc::new(Events::new(1));
        let producers = [1, 2].map(|n| {
            let events = events.clone();
            thread::spawn(move || events.publish(stored(n)))
        });
        let mut records = Vec::new();
        events.drain(8, 0, &mut records).expect("nobody else drains");
        for producer in producers {
            producer.join().expect("the producer ends");
        }
        settle(&events, &mut records, 0);
        assert_whole(&records, &[1, 2]);
    });
}

/// The consumer gives up an event while its producer finishes it: taken or dropped, once.
#[test]
fn given_up_while_written() {
    loom::model(|| {
        let events = Arc::new(Events::new(2));
        let producer = {
            let events = events.clone();
            thread::spawn(move || events.publish(stored(1)))
        };
        let mut records = Vec::new();
        let first = events.drain(8, 0, &mut records).expect("nobody else drains");
        let second = events.drain(8, PATIENCE_MS, &mut records).expect("nobody else drains");
        assert!(!(first.pending && second.pending), "its time is over");
        producer.join().expect("the producer ends");
        settle(&events, &mut records, PATIENCE_MS);
        assert_whole(&records, &[1]);
    });
}

/// Two consumers: one is told that the other drains, or comes after it; nothing is given out twice.
#[test]
fn consumers_exclude_each_other() {
    loom::model(|| {
        let events = Arc::new(Events::new(2));
        events.publish(stored(1));
        let other = {
            let events = events.clone();
            thread::spawn(move || {
                let mut records = Vec::new();
                let _ = events.drain(1, 0, &mut records);
                records
            })
        };
        let mut records = Vec::new();
        let _ = events.drain(1, 0, &mut records);
        records.extend(other.join().expect("the consumer ends"));
        assert_eq!(records.len(), 1);
        assert_whole(&records, &[1]);
    });
}
