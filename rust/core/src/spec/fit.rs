//! Page sizes that tile one extent: rounds sizes up until their common multiple is small.

/// The most the granule may be, in largest pages.
pub(super) const MAX_MULTIPLE: u64 = 64;
/// A size grows by at most one part in so many.
const MAX_LOSS: u64 = 4;
/// How many divisors of a granule are tried for one size.
const TRIES: u64 = 128;
/// A granule of so many bytes is as bad as pages that lose everything: pools are tens of GiB, and want tens of extents.
const GRANULE_COST: u64 = 16 << 30;
/// An exact granule of at most so many bytes is taken without looking further.
const GOOD_GRANULE: u64 = 64 << 20;
/// Costs are counted in parts of so many.
const SCALE: u64 = 1 << 12;

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

/// The sizes rounded up so that their common multiple is at most [`MAX_MULTIPLE`] times the largest, by the least cost in
/// bytes lost and in size of the granule. Sizes are in units of `step` bytes, at most 2^32 each, none 0. `None`: a size
/// would grow by more than a quarter.
pub(super) fn fit(needed: &[u64], step: u64) -> Option<Fit> {
    let largest = needed.iter().copied().max()?;
    let exact = needed.iter().try_fold(1, |a, &b| lcm(a, b)).filter(|&g| g <= largest * MAX_MULTIPLE);
    if let Some(granule) = exact.filter(|&g| g == largest || g * step <= GOOD_GRANULE) {
        return Some(Fit { sizes: needed.to_vec(), granule });
    }
    // Coarser units for large pages: at most 0.4 % is lost, and ledger units don't get tiny.
    let coarse = 1 << (needed.iter().copied().min()? / 256).max(1).ilog2();
    let units: Vec<u64> = needed.iter().map(|n| n.div_ceil(coarse)).collect();
    let largest = largest.div_ceil(coarse);
    let scaled = |fit: Fit| Fit {
        sizes: fit.sizes.iter().map(|s| s * coarse).collect(),
        granule: fit.granule * coarse,
    };
    let cost = |fit: &Fit| {
        let lost = needed.iter().zip(&fit.sizes).map(|(&n, &s)| (s - n) * SCALE / n).max().unwrap_or(0);
        lost + fit.granule * step / (GRANULE_COST / SCALE)
    };
    // The largest page may grow a little too: to a multiple of a smaller one, or of a small number.
    let mut tops: Vec<u64> = units.iter().copied().chain(1..=MAX_MULTIPLE).collect();
    tops.extend(units.iter().filter(|&&n| n < largest).try_fold(1, |a, &b| lcm(a, b)));
    for top in &mut tops {
        *top = largest.checked_next_multiple_of(*top).unwrap_or(largest);
    }
    tops.retain(|&top| top - largest <= largest / MAX_LOSS);
    tops.sort_unstable();
    tops.dedup();
    let mut best = exact.map(|granule| Fit { sizes: needed.to_vec(), granule });
    for (top, multiple) in tops.iter().flat_map(|&top| (1..=MAX_MULTIPLE).map(move |k| (top, k))) {
        let Some(sizes) = units.iter().map(|&n| divisor(top * multiple, n)).collect::<Option<Vec<u64>>>()
        else {
            continue;
        };
        // The sizes may have a smaller common multiple than the one they were found with.
        let granule = sizes.iter().try_fold(1, |a, &b| lcm(a, b))?;
        // The largest size may have come out below `top`, and then `multiple` is not what the granule is of it.
        if granule > sizes.iter().copied().max()? * MAX_MULTIPLE {
            continue;
        }
        let found = scaled(Fit { sizes, granule });
        if best.as_ref().is_none_or(|b| cost(&found) < cost(b)) {
            best = Some(found);
        }
    }
    best
}

/// The smallest divisor of `granule` that is at least `size` and not a quarter more.
fn divisor(granule: u64, size: u64) -> Option<u64> {
    let most = granule / size;
    let least = granule.div_ceil(size + size / MAX_LOSS).max(most.saturating_sub(TRIES)).max(1);
    (least..=most).rev().find(|n| granule.is_multiple_of(*n)).map(|n| granule / n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_where_it_can_be() {
        assert_eq!(fit(&[7], 256), Some(Fit { sizes: vec![7], granule: 7 }));
        assert_eq!(fit(&[10, 52, 10], 256), Some(Fit { sizes: vec![10, 52, 10], granule: 260 }));
        assert_eq!(fit(&[], 256), None);
    }

    #[test]
    fn small_loss_before_small_granule_before_large_loss() {
        // 8,192 units (2 MiB) and a little more than half of it: int8 with scales beside f16.
        let found = fit(&[8_192, 4_160], 256).expect("fits");
        assert!(found.sizes[0] <= 8_273 && found.sizes[1] <= 4_201, "{found:?}");
        assert!(found.granule <= 256 << 12, "{found:?}");
        // 297,879 units (73 MiB) and 1,536: no granule of many states for the sake of 0.1 %.
        let found = fit(&[1_536, 301_824], 256).expect("fits");
        assert!(found.granule <= 2 * found.sizes[1], "{found:?}");
        assert!(found.sizes[0] <= 1_546 && found.sizes[1] <= 303_000, "{found:?}");
    }

    #[test]
    fn primes_are_rounded_up() {
        let needed = [1_000_003, 999_983, 65_537, 7_919];
        let found = fit(&needed, 256).expect("fits");
        assert!(found.granule <= 64 * 1_250_003);
        for (n, s) in needed.iter().zip(&found.sizes) {
            assert!(s >= n && (s - n) * 10 < *n && found.granule.is_multiple_of(*s), "{found:?}");
        }
    }
}
