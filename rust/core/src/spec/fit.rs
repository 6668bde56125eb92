//! Page sizes that tile one extent: rounds sizes up until their common multiple is small.

/// The most the granule may be, in largest pages.
pub(super) const MAX_MULTIPLE: u64 = 64;
/// A size grows by at most one part in so many.
const MAX_LOSS: u64 = 4;
/// How many divisors of a granule are tried for one size.
const TRIES: u64 = 128;
/// Losses that differ by less than one part in so many count as equal: then the smaller granule wins.
const LOSS_STEPS: u64 = 256;

/// Sizes in the order of the request, and their common multiple.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Fit {
    pub(super) sizes: Vec<u64>,
    pub(super) granule: u64,
}

pub(super) const fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn lcm(a: u64, b: u64) -> Option<u64> {
    (a / gcd(a, b)).checked_mul(b)
}

/// The sizes (at most 2^32 each, none 0) rounded up with the least loss so that their common multiple is at most
/// [`MAX_MULTIPLE`] times the largest. Exact if they fit as they are. `None`: a size would grow by more than a quarter.
pub(super) fn fit(needed: &[u64]) -> Option<Fit> {
    let largest = needed.iter().copied().max()?;
    let exact = needed.iter().try_fold(1, |a, &b| lcm(a, b));
    if let Some(granule) = exact.filter(|&g| g <= largest * MAX_MULTIPLE) {
        return Some(Fit { sizes: needed.to_vec(), granule });
    }
    // The largest page may grow a little too: to a multiple of a smaller one, or of a small number.
    let mut tops: Vec<u64> = needed.iter().copied().chain(1..=MAX_MULTIPLE).collect();
    tops.extend(needed.iter().filter(|&&n| n < largest).try_fold(1, |a, &b| lcm(a, b)));
    for top in &mut tops {
        *top = largest.checked_next_multiple_of(*top).unwrap_or(largest);
    }
    tops.retain(|&top| top - largest <= largest / MAX_LOSS);
    tops.sort_unstable();
    tops.dedup();
    let mut best: Option<(u64, Fit)> = None;
    for (top, multiple) in tops.iter().flat_map(|&top| (1..=MAX_MULTIPLE).map(move |k| (top, k))) {
        let granule = top * multiple;
        let Some(sizes) = needed.iter().map(|&n| divisor(granule, n)).collect::<Option<Vec<u64>>>() else {
            continue;
        };
        let loss = needed.iter().zip(&sizes).map(|(&n, &s)| (s - n) * LOSS_STEPS / n).max().unwrap_or(0);
        if best.as_ref().is_none_or(|(l, b)| (loss, granule) < (*l, b.granule)) {
            // The sizes may have a smaller common multiple than the granule they were found with.
            let granule = sizes.iter().try_fold(1, |a, &b| lcm(a, b))?;
            best = Some((loss, Fit { sizes, granule }));
        }
    }
    best.map(|(_, fit)| fit)
}

/// The smallest divisor of `granule` that is at least `size` and not a quarter more.
fn divisor(granule: u64, size: u64) -> Option<u64> {
    let most = granule / size;
    let least = granule.div_ceil(size + size / MAX_LOSS).max(most.saturating_sub(TRIES)).max(1);
    (least..=most).rev().find(|n| granule.is_multiple_of(*n)).map(|n| granule / n)
}
