//! The arrays that kernels read, bound once and written in place by every step.
//!
//! The core only knows that somebody has them: the binding hands over memory that Python sees, tests and benches use
//! [`Owned`]. Callers: batch.rs.

/// How large the arrays of a batch are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Rows.
    pub rows: usize,
    /// The longest sequence a row can show, in tokens.
    pub tokens: u32,
    /// Entries of a row of the block table.
    pub pages: usize,
    /// The most tokens of one step.
    pub step: u32,
}

/// The arrays of one layer group.
#[derive(Debug)]
pub struct GroupArrays<'a> {
    /// `[rows, pages]`: the frame of each page; 0 where there is none.
    pub block_table: &'a mut [i32],
    /// `[step]`: the slot of each token of the step, -1 behind them.
    pub slot_mapping: &'a mut [i64],
}

/// The arrays that all groups share.
#[derive(Debug)]
pub struct RowArrays<'a> {
    /// `[rows]`: tokens of each row, those of the step included.
    pub seq_lens: &'a mut [i32],
    /// `[rows + 1]`: where each row's tokens of the step begin.
    pub query_start_loc: &'a mut [i32],
    /// `[step]`: the position of each token of the step in its sequence.
    pub positions: &'a mut [i32],
}

/// Somebody who has the arrays.
pub trait Arrays: Send + std::fmt::Debug {
    /// The arrays of a group.
    fn group(&mut self, group: usize) -> GroupArrays<'_>;
    /// The arrays of the rows.
    fn rows(&mut self) -> RowArrays<'_>;
}

/// Arrays of the core's own.
#[derive(Debug)]
pub struct Owned {
    block_tables: Vec<Box<[i32]>>,
    slot_mappings: Vec<Box<[i64]>>,
    seq_lens: Box<[i32]>,
    query_start_loc: Box<[i32]>,
    positions: Box<[i32]>,
}

impl Owned {
    /// Zeroed arrays; slots are -1.
    pub fn new(shape: Shape, groups: usize) -> Self {
        let tables = || vec![0; shape.rows * shape.pages].into();
        let mappings = || vec![-1; shape.step as usize].into();
        Self {
            block_tables: (0..groups).map(|_| tables()).collect(),
            slot_mappings: (0..groups).map(|_| mappings()).collect(),
            seq_lens: vec![0; shape.rows].into(),
            query_start_loc: vec![0; shape.rows + 1].into(),
            positions: vec![0; shape.step as usize].into(),
        }
    }
}

impl Arrays for Owned {
    fn group(&mut self, group: usize) -> GroupArrays<'_> {
        GroupArrays {
            block_table: &mut self.block_tables[group],
            slot_mapping: &mut self.slot_mappings[group],
        }
    }

    fn rows(&mut self) -> RowArrays<'_> {
        let Self { seq_lens, query_start_loc, positions, .. } = self;
        RowArrays { seq_lens, query_start_loc, positions }
    }
}
