//! An unpin beside a time-out beside a second unpin: one of them gets the pin.

use super::{NotPinned, Pins};
use crate::{
    sync::Arc,
    word::{TenantId, Units},
};
use loom::thread;

#[test]
fn a_pin_ends_once() {
    loom::model(|| {
        let pins = Arc::new(Pins::new());
        let id = pins.add(TenantId(1), Units(1), &[], Units(1), Some(5), "").expect("fits");
        let callback = {
            let pins = pins.clone();
            thread::spawn(move || pins.take(id).is_ok())
        };
        let time_out = {
            let pins = pins.clone();
            thread::spawn(move || pins.take_expired(5).len())
        };
        let mine = pins.take(id).is_ok();
        let others = usize::from(callback.join().expect("it ends")) + time_out.join().expect("it ends");
        assert_eq!(usize::from(mine) + others, 1);
        assert_eq!(pins.take(id), Err(NotPinned::Ended(id)));
        assert_eq!(pins.used(TenantId(1)), Units(0));
    });
}

/// What is added while a time-out sweeps is found by the next sweep at the latest.
#[test]
fn an_expiry_is_not_forgotten() {
    loom::model(|| {
        let pins = Arc::new(Pins::new());
        let adding = {
            let pins = pins.clone();
            thread::spawn(move || {
                pins.add(TenantId(1), Units(1), &[], Units(1), Some(5), "").expect("fits");
            })
        };
        let swept = pins.take_expired(9).len();
        adding.join().expect("it ends");
        assert_eq!(swept + pins.take_expired(9).len(), 1);
    });
}
