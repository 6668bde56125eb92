//! Prefix hit rate on a request trace of the Mooncake format (JSON lines with `hash_ids`), one request at a time:
//!
//! `KVALLOC_TRACE=mooncake_conversation_trace.jsonl cargo bench -p kvalloc-core --features measure --bench eviction_trace`
#![allow(clippy::print_stdout, reason = "it is a report")]

fn ids(line: &str) -> Vec<u32> {
    let list = line
        .split_once("\"hash_ids\":")
        .and_then(|(_, rest)| rest.split_once('['))
        .map_or("", |(_, rest)| rest);
    let list = list.split_once(']').map_or(list, |(ids, _)| ids);
    list.split(',').filter_map(|id| id.trim().parse().ok()).collect()
}

fn main() {
    let Ok(path) = std::env::var("KVALLOC_TRACE") else {
        println!("KVALLOC_TRACE names no trace: nothing to do");
        return;
    };
    let text = std::fs::read_to_string(path).expect("the trace can be read");
    let requests: Vec<_> = text.lines().map(ids).collect();
    println!("{:>8} {:>7} {:>10}", "pages", "hits %", "ns a page");
    for pages in [1_000, 2_000, 5_000, 10_000, 20_000, 50_000] {
        let (share, ns) = kvalloc_core::measure::replay(&requests, pages);
        println!("{pages:>8} {:>7.2} {ns:>10.0}", share * 100.0);
    }
}
