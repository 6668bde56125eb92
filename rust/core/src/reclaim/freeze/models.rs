//! The races about a freeze: whoever ends one ends no other, and nobody is overlooked.

#[cfg(kvalloc_loom)]
use loom::{model, thread};
#[cfg(kvalloc_shuttle)]
use shuttle::thread;

use super::*;
use crate::sync::Arc;

#[cfg(kvalloc_shuttle)]
fn model(f: impl Fn() + Send + Sync + 'static) {
    shuttle::check_pct(f, 20_000, 3);
}

const TENANT: TenantId = TenantId(1);

fn spawn(freezes: &Arc<Freezes>, f: impl FnOnce(&Freezes) + Send + 'static) -> thread::JoinHandle<()> {
    let freezes = Arc::clone(freezes);
    thread::spawn(move || f(&freezes))
}

/// A plan comes to nothing while its tenant is thawed and frozen by hand: the freeze stands.
#[test]
fn models_the_end_of_a_plan_against_a_freeze_by_hand() {
    model(|| {
        let freezes = Arc::new(Freezes::new(2));
        let plan = freezes.begin(TENANT);
        let other = spawn(&freezes, move |freezes| freezes.end(&plan, false));
        freezes.thaw(TENANT);
        freezes.freeze(TENANT);
        assert!(freezes.any() && freezes.is_frozen(TENANT));
        other.join().expect("no panic");
        assert!(freezes.any() && freezes.is_frozen(TENANT));
        freezes.thaw(TENANT);
        assert!(!freezes.any() && !freezes.is_frozen(TENANT));
    });
}

/// Two plans of one tenant, one committed and one not, beside a thaw, which ends both freezes, whatever comes first.
#[test]
fn models_the_ends_of_two_plans_against_a_thaw() {
    model(|| {
        let freezes = Arc::new(Freezes::new(2));
        let (one, two) = (freezes.begin(TENANT), freezes.begin(TENANT));
        let first = spawn(&freezes, move |freezes| freezes.end(&one, true));
        let second = spawn(&freezes, |freezes| freezes.thaw(TENANT));
        freezes.end(&two, false);
        first.join().expect("no panic");
        second.join().expect("no panic");
        assert!(!freezes.is_frozen(TENANT));
        assert_eq!(freezes.any.get(), 0);
    });
}
