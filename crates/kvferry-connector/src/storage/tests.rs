//! Both halves together, over real files.

mod errors;
mod machine;
mod preempted;
mod roles;
mod scheduling;
mod sharing;
mod windows;
