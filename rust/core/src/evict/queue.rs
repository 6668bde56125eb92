//! A queue of pages without locks: Michael and Scott's, over indices. And a stack, Treiber's, of the same nodes.
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
//! | `node_value` of k | the page that node k stands for, XORed with k | |
//! | `spares[p]` | the spare node of page p, XORed with p | |
//! | top of a stack | the page + 1, 0: none | tag, one more with every change |
//!
//! The tags make an old word unequal to a new one, so a node may be used again at once, in any queue. A page on a stack keeps
//! its spare node, whose link then names the page below + 1.
//!
//! # Runs
//!
//! Pages come and go in runs, as sequences do, and a run costs what a page costs: it is linked in private and hung behind
//! the last node at once, and the head moves over many nodes at once. That is sound because a node's link never changes
//! while the node stands in the queue, and it stands there as long as the head's tag shows that nobody popped.
//!
//! # Who may write
//!
//! The spare of a page belongs to whoever just set its QUEUED bit (and enqueues it), or popped it and hasn't cleared
//! the bit yet. The value of a node belongs to whoever holds the node.
//!
//! A thread that stops anywhere in here stops nobody: a linked node that the tail doesn't know of yet is reached by
//! whoever comes next.

use crate::{
    page::Pages,
    sync::{Atom, AtomicU32, AtomicU64, zeroed_halves},
    word::PageId,
};

const HALF: u64 = u32::MAX as u64;
const TAG: u64 = 1 << 32;

/// The most pages that are taken out at once.
pub(super) const MOST: usize = 16;

/// One queue: its two words, and the node it started with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue<'a> {
    pub(super) head: &'a AtomicU64,
    pub(super) tail: &'a AtomicU64,
    pub(super) first: u32,
}

/// One stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stack<'a>(pub(super) &'a AtomicU64);

/// A node that nobody else has.
#[derive(Debug)]
pub(super) struct Node(u32);

/// The pages that one thread has taken out of a queue, each with the node that is its spare from now on.
#[derive(Debug, Default)]
pub(super) struct Hand {
    pages: [(PageId, u32); MOST],
    len: usize,
    next: usize,
}

impl Hand {
    pub(super) fn is_empty(&self) -> bool {
        self.next == self.len
    }
}

impl From<(PageId, Node)> for Hand {
    fn from((page, Node(node)): (PageId, Node)) -> Self {
        let mut pages = [(PageId(0), 0); MOST];
        pages[0] = (page, node);
        Self { pages, len: 1, next: 0 }
    }
}

impl Iterator for Hand {
    type Item = (PageId, Node);
    fn next(&mut self) -> Option<(PageId, Node)> {
        let &(page, node) = self.pages[..self.len].get(self.next)?;
        self.next += 1;
        Some((page, Node(node)))
    }
}

/// The spare node of each page.
#[derive(Debug)]
pub(super) struct Spares(Box<[AtomicU32]>);

impl Spares {
    pub(super) fn new(pages: u32) -> Self {
        Self(zeroed_halves(pages as usize))
    }
    /// The caller owns the page's place in the order.
    pub(super) fn of(&self, id: PageId) -> Node {
        Node(self.0[id.as_usize()].get() ^ id.0)
    }
    /// Give a page its spare node back, before its QUEUED bit goes.
    pub(super) fn set(&self, id: PageId, &Node(node): &Node) {
        self.0[id.as_usize()].put(node ^ id.0);
    }
    pub(super) fn bytes(&self) -> u64 {
        size_of_val(&*self.0) as u64
    }
}

/// This index, with the tag `n` changes on.
fn retag(word: u64, index: u32, n: u32) -> u64 {
    (word & !HALF).wrapping_add(u64::from(n) * TAG) | u64::from(index)
}

impl Queue<'_> {
    fn node(self, word: u64) -> u32 {
        word as u32 ^ self.first
    }

    /// Put pages at the end, one behind the other.
    pub(super) fn push(self, pages: &Pages, items: impl Iterator<Item = (PageId, Node)>) {
        // Nobody else sees these nodes before the first of them is linked.
        let mut ends: Option<(u32, u32)> = None;
        for (id, Node(node)) in items {
            pages.node_value(node).put(u64::from(id.0 ^ node));
            let next = pages.node_next(node);
            next.put(next.get() & !HALF);
            if let Some((_, last)) = ends {
                let link = pages.node_next(last);
                link.put(retag(link.get(), node + 1, 1));
            }
            ends = Some((ends.map_or(node, |(first, _)| first), node));
        }
        let Some((first, end)) = ends else { return };
        loop {
            let tail = self.tail.get();
            let last = pages.node_next(self.node(tail));
            let after = last.get();
            if tail != self.tail.get() {
                continue;
            }
            if let Some(behind) = (after as u32).checked_sub(1) {
                // Somebody linked a node and has not moved the tail yet.
                let _ = self.tail.cas(tail, retag(tail, behind ^ self.first, 1));
            } else if last.cas(after, retag(after, first + 1, 1)).is_ok() {
                let _ = self.tail.cas(tail, retag(tail, end ^ self.first, 1));
                return;
            }
        }
    }

    /// Take the pages that stand first, `most` at most. An empty hand: there are none.
    pub(super) fn pop(self, pages: &Pages, most: usize) -> Hand {
        let mut hand = Hand::default();
        loop {
            let head = self.head.get();
            let tail = self.tail.get();
            let mut dummy = self.node(head);
            let mut behind_tail = None;
            hand.len = 0;
            while hand.len < most.min(MOST) {
                let Some(first) = (pages.node_next(dummy).get() as u32).checked_sub(1) else { break };
                if dummy == self.node(tail) {
                    behind_tail = Some(first);
                    break;
                }
                // Read before the head moves: afterwards the node belongs to the page's next turn.
                let page = PageId(pages.node_value(first).get() as u32 ^ first);
                hand.pages[hand.len] = (page, dummy);
                hand.len += 1;
                dummy = first;
            }
            if !hand.is_empty() {
                if self.head.cas(head, retag(head, dummy ^ self.first, hand.len as u32)).is_ok() {
                    return hand;
                }
            } else if head == self.head.get() {
                let Some(first) = behind_tail else { return hand };
                let _ = self.tail.cas(tail, retag(tail, first ^ self.first, 1));
            }
        }
    }
}

impl Stack<'_> {
    /// Put a page on top, whose place in the order the caller has.
    pub(super) fn push(self, pages: &Pages, spares: &Spares, id: PageId) {
        let link = pages.node_next(spares.of(id).0);
        let mut top = self.0.first();
        loop {
            link.put(retag(link.get(), top as u32, 1));
            match self.0.cas(top, retag(top, id.0 + 1, 1)) {
                Ok(_) => return,
                Err(found) => top = found,
            }
        }
    }

    /// Take the page on top, with its spare node.
    pub(super) fn pop(self, pages: &Pages, spares: &Spares) -> Option<(PageId, Node)> {
        let mut top = self.0.first();
        loop {
            let id = PageId((top as u32).checked_sub(1)?);
            // If the page has left meanwhile these are another's, and the tag tells.
            let node = spares.of(id);
            let below = pages.node_next(node.0).get() as u32;
            match self.0.cas(top, retag(top, below, 1)) {
                Ok(_) => return Some((id, node)),
                Err(found) => top = found,
            }
        }
    }
}
