use clap::CommandFactory;
use kvferry_engine::Lane;

use super::*;
use crate::prompts::{Share, bytes_to_read};

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(std::iter::once("kvferry").chain(line.split_whitespace()))
}

fn demo(line: &str) -> DemoArgs {
    match parse(&format!("demo {line}")).unwrap().command {
        Command::Demo(args) => args,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn sizes_are_bytes_or_powers_of_1024() {
    for (text, bytes) in [
        ("1", 1),
        ("4096", 4096),
        ("32K", 32 << 10),
        ("32k", 32 << 10),
        ("1M", 1 << 20),
        ("1MiB", 1 << 20),
        ("2G", 2 << 30),
        ("3T", 3 << 40),
        ("0", 0),
    ] {
        assert_eq!(parse_size(text), Ok(bytes), "{text}");
    }
    for text in ["", "K", "-1", "1.5M", "1X", "1 K", "0x10", "ten"] {
        let error = parse_size(text).unwrap_err();
        assert!(error.contains(&format!("{text:?}")), "{error}");
    }
    for text in ["18446744073709551616", "16777216T"] {
        let error = parse_size(text).unwrap_err();
        assert!(error.contains(text) && error.contains("2^64"), "{error}");
    }
}

#[test]
fn the_defaults_read_a_gibibyte_in_at_least_64_requests_whatever_the_seed() {
    let mut plan = demo("").plan.plan().unwrap();
    for seed in 0..16 {
        plan.seed = seed;
        assert!(bytes_to_read(&plan) >= 1 << 30, "seed {seed}");
        let read_from = (0..plan.requests)
            .filter(|&request| Share::of(seed, request).count(plan.blocks) > 0)
            .count();
        assert!(read_from >= 64, "seed {seed}");
    }
}

#[test]
fn lanes_and_faults_are_read_by_name() {
    assert_eq!(demo("").read.lane, LaneChoice::Auto);
    for lane in Lane::ALL {
        let args = demo(&format!("--lane {lane}"));
        assert_eq!(args.read.lane, LaneChoice::Pinned(lane));
    }
    let error = parse("demo --lane fast").unwrap_err().to_string();
    assert!(
        error.contains("fast") && error.contains("served"),
        "{error}"
    );
    assert_eq!(demo("--fault skip-read").read.fault, Some(Fault::SkipRead));
    let help = Cli::command()
        .find_subcommand_mut("demo")
        .unwrap()
        .render_long_help()
        .to_string();
    assert!(!help.contains("--fault"), "{help}");
}

#[test]
fn zero_and_too_much_are_refused_by_option_and_value() {
    let refused = |line: &str| {
        let error = demo(line).plan.plan().unwrap_err();
        assert_eq!(error.exit_status(), 2, "{line}");
        error.to_string()
    };
    for option in ["requests", "blocks", "block-bytes", "layers"] {
        let text = refused(&format!("--{option} 0"));
        assert!(
            text.contains(&format!("--{option} is 0: give 1 to ")),
            "{text}"
        );
    }
    assert!(refused("--blocks 65537").contains("--blocks is 65537: give 1 to 65536"));
    assert!(refused("--layers 65537").contains("--layers is 65537: give 1 to 65536"));
    let text = refused("--requests 18446744073709551615 --block-bytes 1T");
    assert!(
        text.contains("18446744073709551615 requests") && text.contains("1099511627776 bytes"),
        "{text}"
    );
    assert!(parse("demo --blocks=-1").is_err());
    assert!(parse("demo --requests=18446744073709551616").is_err());
}

#[test]
fn another_process_gets_the_same_plan() {
    let args = demo("--requests 9 --blocks 3 --block-bytes 7K --layers 2 --seed 5").plan;
    let again = demo(&args.as_options().join(" ")).plan;
    assert_eq!(again.plan().unwrap(), args.plan().unwrap());
}
