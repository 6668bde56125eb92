//! Geometry against known models, against counting page by page, and against absurd sizes.

use proptest::prelude::*;

use super::{fit::gcd, *};

const GIB: f64 = (1u64 << 30) as f64;

fn attention(name: &str, kind: GroupKind, layers: u32, kv_heads: u32, dim: u32) -> GroupSpec {
    GroupSpec {
        name: name.into(),
        kind,
        layers,
        kv_heads,
        k_dim: dim,
        v_dim: dim,
        dtype: Dtype::Bf16,
        state_bytes: 0,
    }
}

fn full(layers: u32, kv_heads: u32, dim: u32) -> GroupSpec {
    attention("full", GroupKind::Full, layers, kv_heads, dim)
}

fn window(tokens: u32, layers: u32, kv_heads: u32, dim: u32) -> GroupSpec {
    attention("window", GroupKind::Window { tokens }, layers, kv_heads, dim)
}

fn latent(layers: u32) -> GroupSpec {
    GroupSpec {
        kind: GroupKind::Latent,
        k_dim: 576,
        v_dim: 0,
        ..attention("mla", GroupKind::Full, layers, 1, 1)
    }
}

fn state(layers: u32, bytes: u64) -> GroupSpec {
    GroupSpec {
        name: "state".into(),
        kind: GroupKind::State,
        layers,
        kv_heads: 0,
        k_dim: 0,
        v_dim: 0,
        dtype: Dtype::F32,
        state_bytes: bytes,
    }
}

fn spec(groups: Vec<GroupSpec>) -> Spec {
    Spec::new(16, groups, Layout::PageMajor, None).expect("a sound spec")
}

const G0: GroupId = GroupId(0);
const G1: GroupId = GroupId(1);

#[test]
fn known_models() {
    // groups, all, grow, window cap
    let table: Vec<(Vec<GroupSpec>, u64, u64, u64)> = vec![
        (vec![full(28, 4, 128)], 57_344, 57_344, 0), // Qwen2.5-7B
        (vec![full(32, 1, 64)], 8_192, 8_192, 0),    // Falcon-7B
        (vec![latent(61)], 70_272, 70_272, 0),       // DeepSeek-V3
        (vec![full(10, 16, 128), window(1024, 52, 16, 128)], 507_904, 81_920, 436_207_616), // Gemma-3-27B
        (vec![window(4096, 32, 8, 128)], 131_072, 0, 536_870_912), // Mistral-7B-v0.1
        (vec![full(12, 8, 64), window(128, 12, 8, 64)], 49_152, 24_576, 3_145_728), // gpt-oss-20b
        (
            vec![full(12, 8, 128), attention("chunked", GroupKind::Chunked { tokens: 8192 }, 36, 8, 128)],
            196_608,
            49_152,
            1_207_959_552, // Llama-4
        ),
        (
            vec![
                GroupSpec { k_dim: 192, ..full(9, 4, 128) },
                GroupSpec { k_dim: 192, ..window(128, 39, 8, 128) },
            ],
            222_720,
            23_040,
            25_559_040, // MiMo-V2-Flash
        ),
    ];
    for (groups, all, grow, cap) in table {
        let spec = spec(groups);
        assert_eq!(spec.bytes_per_token(), all);
        assert_eq!(spec.grow_bytes_per_token(), grow);
        assert_eq!(spec.window_cap_bytes(), cap);
        assert!(spec.classes().iter().all(|c| c.padding() == 0 && c.page_bytes % PAGE_ALIGN == 0));
        assert!(spec.granule() <= 64 * spec.sizes()[spec.sizes().len() - 1]);
    }
}

#[test]
fn planner_gpt_oss() {
    let big = spec(vec![full(18, 8, 64), window(128, 18, 8, 64)]);
    let flat = big.unwindowed();
    // 5.38 GiB: 78,384 tokens with every layer kept in full.
    let bytes = 78_384 * 73_728u64;
    assert_eq!(format!("{:.2}", bytes as f64 / GIB), "5.38");
    assert_eq!(flat.tokens_in(bytes, 1, 1), Some(78_384));
    assert_eq!(flat.tokens_in(bytes - 1, 1, 1), Some(78_368));
    // With the window: 9 pages of it, the rest for the other half of the layers.
    assert_eq!(big.tokens_in(bytes, 1, 1), Some(((bytes - 9 * 589_824) / 589_824 * 16) as u32));

    let small = spec(vec![full(12, 8, 64), window(128, 12, 8, 64)]);
    assert_eq!(format!("{:.2}", 32.0 * small.bytes_for(8_192) as f64 / GIB), "6.09");
    assert_eq!(32 * small.unwindowed().bytes_for(8_192), 12 << 30);
    assert_eq!(small.tokens_in(32 * small.peak_for(8_192, 1), 32, 1), Some(8_192));
    assert_eq!(small.sequences_in(32 * small.peak_for(8_192, 1), 8_192, 1), 32);
}

#[test]
fn planner_others() {
    assert_eq!(spec(vec![full(64, 8, 128)]).bytes_for(275_760), 275_760 * 262_144); // Qwen3-32B, 67.32 GiB
    let gemma = spec(vec![full(10, 16, 128), window(1024, 52, 16, 128)]);
    assert_eq!(format!("{:.2}", gemma.bytes_for(131_072) as f64 / GIB), "10.41");
    assert_eq!(format!("{:.1}", gemma.unwindowed().bytes_for(131_072) as f64 / GIB), "62.0");
    assert_eq!(format!("{:.2}", spec(vec![latent(61)]).bytes_for(163_840) as f64 / GIB), "10.72");
    // starcoder2-3b: 4,096 tokens of window and steps of 8,192 touch 769 pages.
    let starcoder = spec(vec![window(4_096, 30, 2, 128)]);
    assert_eq!(starcoder.peak_pages(G0, 16_384, 8_192), 769);
    let bytes = 2_198_512 / 16 * starcoder.page_bytes(G0);
    assert_eq!(format!("{:.2}", bytes as f64 / starcoder.peak_for(16_384, 8_192) as f64), "178.68");
    assert_eq!(starcoder.sequences_in(bytes, 16_384, 8_192), 178);
    assert_eq!(starcoder.tokens_in(bytes, 178, 8_192), None, "a window never needs more");
    assert_eq!(starcoder.tokens_in(bytes, 179, 8_192), Some(767 * 16));
}

#[test]
fn window_edges() {
    let spec = spec(vec![window(128, 12, 8, 64)]);
    for (len, first, pages) in [
        (0, 0, 0),
        (1, 0, 1),
        (127, 0, 8),
        (128, 0, 8),
        (142, 0, 9),
        (143, 1, 8),
        (144, 1, 8),
        (8_192, 504, 8),
    ] {
        assert_eq!(spec.first_needed(G0, len), first, "{len}");
        assert_eq!(spec.pages_of(G0, len).len(), pages, "{len}");
    }
    assert_eq!(spec.peak_pages(G0, 8_192, 1), 9);
    assert_eq!(spec.peak_pages(G0, 128, 1), 8);
    assert_eq!(spec.first_needed(G0, u32::MAX), (u32::MAX - 127) / 16);
    assert_eq!(spec.anchor(), None);
}

#[test]
fn chunk_edges() {
    let spec = spec(vec![attention("chunked", GroupKind::Chunked { tokens: 8_192 }, 36, 8, 128)]);
    assert_eq!(spec.pages_of(G0, 8_191), 0..512);
    assert_eq!(spec.pages_of(G0, 8_192), 512..512, "token 8,192 begins a chunk");
    assert_eq!(spec.pages_of(G0, 8_193), 512..513);
    assert_eq!(spec.peak_pages(G0, 100_000, 1), 512);
    assert_eq!(spec.peak_for(100_000, 1), 1_207_959_552);
    let odd = Spec::new(
        16,
        vec![attention("chunked", GroupKind::Chunked { tokens: 24 }, 1, 1, 8)],
        Layout::PageMajor,
        None,
    )
    .expect("sound");
    assert_eq!(odd.pages_of(G0, 25), 1..2, "a chunk that begins inside a page keeps the page");
}

#[test]
fn states_and_small_classes() {
    // Qwen3-Next: 36 gated-delta-net layers.
    let spec =
        Spec::new(16, vec![full(12, 2, 256), state(36, 77_266_944)], Layout::PageMajor, Some(Dtype::Int8))
            .expect("sound");
    assert_eq!(spec.state_bytes(), 77_266_944);
    assert_eq!(spec.classes().len(), 3);
    assert_eq!(spec.small_class_of(G0), Some(ClassId(2)));
    assert_eq!(spec.small_class_of(G1), None);
    let [page, state, small] = spec.classes() else { panic!("three") };
    assert_eq!(page.raw_bytes, 393_216);
    assert_eq!(small.raw_bytes, 12 * 16 * 2 * (512 + 4));
    assert_eq!(state.raw_bytes, 77_266_944);
    for class in spec.classes() {
        assert!(class.padding() * 20 < class.raw_bytes, "{class:?}");
        assert_eq!(spec.granule() % class.page_bytes, 0);
        assert_eq!(spec.sizes()[class.size.as_usize()], class.page_bytes);
    }
    assert_eq!(spec.bytes_for(0), 0);
    assert_eq!(spec.bytes_for(17), 2 * page.page_bytes + state.page_bytes);
    assert_eq!(spec.anchor(), Some(G0));
}

#[test]
fn one_number_with_padding() {
    let spec = Spec::new(5, vec![full(3, 1, 7)], Layout::PageMajor, None).expect("sound");
    let class = &spec.classes()[0];
    assert_eq!((class.raw_bytes, class.layer_bytes, class.page_bytes), (420, 144, 512));
    assert_eq!(spec.page_bytes(G0), 512);
    assert_eq!(spec.bytes_for(6), 1_024);
    assert_eq!(spec.bytes_per_token(), 84);
    assert_eq!((spec.unit(), spec.units(ClassId(0))), (512, 1));
}

#[test]
fn layer_major() {
    let groups = vec![full(12, 8, 64), window(128, 12, 4, 64)];
    let spec = Spec::new(16, groups, Layout::LayerMajor, None).expect("same layers");
    for class in spec.classes() {
        assert_eq!(class.layer_bytes * 12, class.page_bytes);
        assert_eq!(class.layer_bytes % PAGE_ALIGN, 0);
    }
    let groups = vec![full(12, 8, 64), window(128, 11, 8, 64)];
    let error = Spec::new(16, groups, Layout::LayerMajor, None).expect_err("12 and 11");
    assert!(error.to_string().contains("\"full\" has 12, \"window\" has 11"), "{error}");
}

#[test]
fn arenas() {
    // Pages of 17,989,632 bytes in 5 GiB: rounded down, told.
    let one = Spec::new(64, vec![full(61, 1, 1_152)], Layout::PageMajor, None).expect("sound");
    assert_eq!(one.page_bytes(G0), 17_989_632);
    let arena = one.arena(5 << 30).expect("fits");
    assert_eq!((arena.bytes, arena.rounded_off), (298 * 17_989_632, 7_798_784));
    assert_eq!(arena.extent_bytes, 32 * 17_989_632);
    assert_eq!(arena.extents, 10);
    assert_eq!(arena.reserved, 17_989_632);
    assert_eq!(
        one.arena(20_000_000),
        Err(SpecError::ArenaTooSmall { bytes: 20_000_000, needed: 2 * 17_989_632 })
    );
    assert!(matches!(one.arena(u64::MAX), Err(SpecError::ArenaTooLarge { .. })));

    let two = spec(vec![full(10, 16, 128), window(1024, 52, 16, 128)]);
    let arena = two.arena(24 << 30).expect("fits");
    assert_eq!(arena.extent_bytes % two.granule(), 0);
    assert!(arena.extents >= 128 && u64::from(arena.extents) * arena.extent_bytes == arena.bytes);
    assert!(matches!(two.arena(two.granule()), Err(SpecError::ArenaTooSmall { .. })));
    assert!(two.arena(2 * two.granule()).is_ok());
}

#[test]
fn absurd_sizes_are_errors() {
    let huge = full(u32::MAX, u32::MAX, u32::MAX);
    let error = Spec::new(MAX_PAGE_TOKENS, vec![huge], Layout::PageMajor, None).expect_err("absurd");
    assert!(matches!(error, SpecError::PageTooLarge { .. }), "{error}");
    let layer_major = full(u32::MAX, 1, 1);
    assert!(Spec::new(1, vec![layer_major], Layout::LayerMajor, None).is_ok(), "just 2^40 bytes");
    for (group, field) in [
        (full(0, 1, 1), "layers"),
        (full(1, 0, 1), "kv_heads"),
        (full(1, 1, 0), "k_dim"),
        (GroupSpec { v_dim: 0, ..full(1, 1, 1) }, "v_dim"),
        (window(0, 1, 1, 1), "window"),
        (GroupSpec { v_dim: 1, ..latent(1) }, "v_dim"),
        (GroupSpec { kv_heads: 8, ..latent(1) }, "kv_heads"),
        (state(1, 0), "state_bytes"),
        (GroupSpec { state_bytes: 1, ..full(1, 1, 1) }, "state_bytes"),
    ] {
        let error = Spec::new(16, vec![group], Layout::PageMajor, None).expect_err(field);
        assert!(matches!(&error, SpecError::Group { field: f, .. } if *f == field), "{error}");
    }
    for page_tokens in [0, MAX_PAGE_TOKENS + 1, u32::MAX] {
        let error = Spec::new(page_tokens, vec![full(1, 1, 1)], Layout::PageMajor, None).expect_err("tokens");
        assert_eq!(error, SpecError::PageTokens { given: page_tokens, max: MAX_PAGE_TOKENS });
    }
    assert!(Spec::new(16, vec![], Layout::PageMajor, None).is_err());
    assert!(Spec::new(16, vec![full(1, 1, 1), full(1, 1, 1)], Layout::PageMajor, None).is_err());
    let fp8 = GroupSpec { dtype: Dtype::Fp8, ..full(1, 1, 64) };
    assert!(matches!(
        Spec::new(16, vec![fp8], Layout::PageMajor, Some(Dtype::Int8)),
        Err(SpecError::SmallNotSmaller { .. })
    ));
}

fn any_group(i: usize) -> impl Strategy<Value = GroupSpec> {
    (0u32..4, 1u32..70, 1u32..20, 1u32..300, 1u32..5_000, 1u64..100_000_000).prop_map(
        move |(kind, layers, heads, dim, tokens, bytes)| {
            let mut group = match kind {
                0 => full(layers, heads, dim),
                1 => window(tokens, layers, heads, dim),
                2 => attention("chunked", GroupKind::Chunked { tokens }, layers, heads, dim),
                _ => state(layers, bytes),
            };
            group.name = format!("{i}");
            group
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Sizes tile the granule, lose little, and are never less than what is stored.
    #[test]
    fn sizes_tile(a in any_group(0), b in any_group(1), c in any_group(2), page in 1u32..130) {
        if let Ok(spec) = Spec::new(page, vec![a, b, c], Layout::PageMajor, None) {
            let largest = spec.sizes()[spec.sizes().len() - 1];
            prop_assert!(spec.granule() <= largest * 64);
            for class in spec.classes() {
                prop_assert!(class.page_bytes >= class.raw_bytes);
                prop_assert!(class.padding() <= class.raw_bytes / 4 + 256 + 16 * 70);
                prop_assert_eq!(class.page_bytes % PAGE_ALIGN, 0);
                prop_assert_eq!(spec.granule() % class.page_bytes, 0);
                prop_assert_eq!(class.page_bytes % spec.unit(), 0);
            }
            prop_assert_eq!(spec.sizes().iter().copied().fold(0, gcd), spec.unit());
        }
    }

    /// What a sequence holds is what a walk token by token would keep; the peak is the most of it and never falls.
    #[test]
    fn pages_are_counted_right(group in any_group(0), page in 1u32..40, len in 0u32..3_000, step in 1u32..50) {
        let spec = Spec::new(page, vec![group], Layout::PageMajor, None).expect("one group always fits");
        let needs = |token: u32| match spec.groups()[0].kind {
            GroupKind::Window { tokens } => (token + 1).saturating_sub(tokens),
            GroupKind::Chunked { tokens } => token - token % tokens,
            _ => 0,
        };
        let pages = spec.pages_of(G0, len);
        if spec.groups()[0].kind != GroupKind::State {
            for index in 0..len.div_ceil(page) {
                let last = index * page + page - 1;
                prop_assert_eq!(pages.contains(&index), last >= needs(len), "page {}", index);
            }
        }
        // From len, a step of `step` more tokens.
        let during = spec.first_needed(G0, len)..(len + step).div_ceil(page);
        if spec.groups()[0].kind != GroupKind::State {
            prop_assert!(during.len() as u32 <= spec.peak_pages(G0, len + step, step));
        }
        prop_assert!(spec.peak_for(len, step) <= spec.peak_for(len + 1, step));
        prop_assert!(spec.bytes_for(len) <= spec.peak_for(len, 1));
    }

    /// The planner's answer fits and one token more does not.
    #[test]
    fn planner_is_tight(a in any_group(0), bytes in 0u64..1 << 40, n in 1u32..100, step in 1u32..9_000) {
        let spec = Spec::new(16, vec![a], Layout::PageMajor, None).expect("one group always fits");
        match spec.tokens_in(bytes, n, step) {
            Some(tokens) => {
                prop_assert!(spec.peak_for(tokens, step) * u64::from(n) <= bytes);
                prop_assert!(spec.peak_for(tokens + 1, step) * u64::from(n) > bytes);
            }
            None => prop_assert!(spec.peak_for(u32::MAX, step) * u64::from(n) <= bytes),
        }
    }

    /// Arenas are whole frames, lose less than an extent, and count within their limits.
    #[test]
    fn arenas_are_whole(a in any_group(0), b in any_group(1), bytes in 0u64..1 << 38) {
        let Ok(spec) = Spec::new(16, vec![a, b], Layout::PageMajor, None) else { return Ok(()) };
        match spec.arena(bytes) {
            Ok(arena) => {
                prop_assert_eq!(arena.bytes + arena.rounded_off, bytes);
                prop_assert!(arena.rounded_off < arena.extent_bytes);
                prop_assert_eq!(u64::from(arena.extents), arena.bytes.div_ceil(arena.extent_bytes));
                prop_assert!(arena.sizes.len() == 1 || arena.bytes % arena.extent_bytes == 0);
                for size in &arena.sizes {
                    prop_assert_eq!(arena.extent_bytes % size, 0);
                    prop_assert!(arena.bytes / size <= MAX_FRAMES);
                }
            }
            Err(SpecError::ArenaTooSmall { needed, .. }) => {
                prop_assert!(needed > bytes && spec.arena(needed).is_ok());
            }
            Err(SpecError::ArenaTooLarge { most, .. }) => prop_assert!(most < bytes),
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}
