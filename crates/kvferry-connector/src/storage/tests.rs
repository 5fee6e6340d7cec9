//! Both halves together, over real files.

mod errors;
mod machine;
mod preempted;
mod scheduling;
mod sharing;
