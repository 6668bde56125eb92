//! What hashing, the index and the eviction order cost: `cargo bench -p kvalloc-core --features measure --bench rooms`.
#![allow(clippy::print_stdout, reason = "it is a report")]

fn main() {
    for pages in [8_192, 131_072, 1_048_576] {
        println!("{pages} pages:");
        for (what, ns) in kvalloc_core::measure::rooms(pages) {
            println!("  {what:50} {ns:8.1}");
        }
    }
}
