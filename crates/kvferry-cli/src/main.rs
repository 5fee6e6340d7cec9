//! The `kvferry` program; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvferry_cli::run(std::env::args_os())
}
