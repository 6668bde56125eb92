//! A queue of pages without locks: Michael and Scott's, over indices.
//!
//! # Nodes
//!
//! Nothing is ever allocated: a node is two words of the page table's line ([`Pages::node_next`], [`Pages::node_value`]),
//! one per page, and one more per queue, in which it starts. A queue always keeps one node whose page has left already
//! (the dummy); when a page leaves, its own node becomes the dummy and it takes the old dummy along as its spare. So a
//! page that stands in no queue always owns exactly one node, hardly ever the one in its own line.
//!
//! | word | bits 0-31 | bits 32-63 |
//! | --- | --- | --- |
//! | head, tail of a queue | node, XORed with the queue's first node | tag, one more with every change |
//! | `node_next` of node k | the next node + 1, 0: none | tag, one more with every link |
//! | `node_value` of k | the page that node k stands for, XORed with k | the spare node of page k, XORed with k |
//!
//! The tags make an old word unequal to a new one, so a node may be used again at once, in any queue.
//!
//! # Who may write
//!
//! The spare of a page belongs to whoever just set its QUEUED bit (and enqueues it), or popped it and hasn't cleared
//! the bit yet. The value of a node belongs to whoever holds the node. They may be two threads in one word: each
//! changes its half.
//!
//! A thread that stops anywhere in here stops nobody: a linked node that the tail doesn't know of yet is reached by
//! whoever comes next.

use crate::{
    page::Pages,
    sync::{Atom, AtomicU64},
    word::PageId,
};

const HALF: u64 = u32::MAX as u64;
const TAG: u64 = 1 << 32;

/// One queue: its two words, and the node it started with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue<'a> {
    pub(super) head: &'a AtomicU64,
    pub(super) tail: &'a AtomicU64,
    pub(super) first: u32,
}

/// A node that nobody else has.
#[derive(Debug)]
pub(super) struct Node(u32);

/// The next tag, with this index.
fn retag(word: u64, index: u32) -> u64 {
    (word & !HALF).wrapping_add(TAG) | u64::from(index)
}

fn set_half(word: &AtomicU64, shift: u32, half: u32) {
    // Never refused: the closure always answers.
    let _ = word.transit(|now| Some(now & !(HALF << shift) | u64::from(half) << shift));
}

/// The spare node of a page: the caller owns its place in the order.
pub(super) fn spare(pages: &Pages, id: PageId) -> Node {
    Node((pages.node_value(id.0).get() >> 32) as u32 ^ id.0)
}

/// Give a page its spare node back, before its QUEUED bit goes.
pub(super) fn set_spare(pages: &Pages, id: PageId, node: &Node) {
    set_half(pages.node_value(id.0), 32, node.0 ^ id.0);
}

impl Queue<'_> {
    fn node(self, word: u64) -> u32 {
        word as u32 ^ self.first
    }

    /// Put page `id` at the end.
    pub(super) fn push(self, pages: &Pages, id: PageId, node: Node) {
        let Node(node) = node;
        set_half(pages.node_value(node), 0, id.0 ^ node);
        let next = pages.node_next(node);
        next.put(next.get() & !HALF);
        loop {
            let tail = self.tail.get();
            let last = pages.node_next(self.node(tail));
            let after = last.get();
            if tail != self.tail.get() {
                continue;
            }
            if let Some(behind) = (after as u32).checked_sub(1) {
                // Somebody linked a node and has not moved the tail yet.
                let _ = self.tail.cas(tail, retag(tail, behind ^ self.first));
            } else if last.cas(after, retag(after, node + 1)).is_ok() {
                let _ = self.tail.cas(tail, retag(tail, node ^ self.first));
                return;
            }
        }
    }

    /// Take the page that stands first, and the node that is its spare from now on.
    pub(super) fn pop(self, pages: &Pages) -> Option<(PageId, Node)> {
        loop {
            let head = self.head.get();
            let tail = self.tail.get();
            let dummy = self.node(head);
            let after = pages.node_next(dummy).get();
            if head != self.head.get() {
                continue;
            }
            let first = (after as u32).checked_sub(1)?;
            if dummy == self.node(tail) {
                let _ = self.tail.cas(tail, retag(tail, first ^ self.first));
                continue;
            }
            // Read before the head moves: afterwards the node belongs to the page's next turn.
            let page = PageId(pages.node_value(first).get() as u32 ^ first);
            if self.head.cas(head, retag(head, first ^ self.first)).is_ok() {
                return Some((page, Node(dummy)));
            }
        }
    }
}
