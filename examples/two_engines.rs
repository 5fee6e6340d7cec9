//! Two engines in one process: one holds blocks, the other reads them over UCX.
//!
//!     cargo run -p kvferry-engine --example two_engines
//!
//! Between hosts the description travels through a directory (`kvferry serve` / `kvferry pull`);
//! here it is handed over directly.

use std::error::Error;
use std::time::Duration;

use kvferry_engine::wire::EngineId;
use kvferry_engine::{BlockPair, Engine, EngineConfig, HostPool, LaneChoice, TableSpec};

const BLOCK_BYTES: u64 = 32 << 10;
const TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    // The producer: a pool of 64 blocks; block 17 holds something.
    let producer = Engine::builder(EngineConfig::new(EngineId::new("prefill-0")?)).start()?;
    let source = HostPool::new(64 * BLOCK_BYTES as usize)?.region()?;
    let source_region = producer.register(&source)?;
    producer.add_table(&source_region, TableSpec::dense(BLOCK_BYTES, 64))?;
    source.fill(17 * BLOCK_BYTES, BLOCK_BYTES, 0x4b)?;

    // The consumer: a pool of its own, and a connection.
    let consumer = Engine::builder(EngineConfig::new(EngineId::new("decode-0")?)).start()?;
    let target = HostPool::new(8 * BLOCK_BYTES as usize)?.region()?;
    let target_region = consumer.register(&target)?;
    let blocks = consumer.add_table(&target_region, TableSpec::dense(BLOCK_BYTES, 8))?;
    let peer = consumer.connect(producer.describe()?, LaneChoice::Auto)?;

    // The producer's block 17 into our block 3.
    let theirs = peer.tables().next().ok_or("the producer has no tables")?;
    let transfer = peer.read(&[(blocks, theirs)], &[BlockPair::new(3, 17)])?;
    let report = transfer.wait(TIMEOUT).ok_or("the read has not ended")??;

    let mut bytes = vec![0; BLOCK_BYTES as usize];
    target.read_at(3 * BLOCK_BYTES, &mut bytes)?;
    assert!(bytes.iter().all(|&byte| byte == 0x4b));
    println!(
        "{} bytes in {} operations over lane {}, {}",
        report.bytes,
        report.operations,
        peer.lane(),
        peer.transports(),
    );

    consumer.shutdown(TIMEOUT)?;
    producer.shutdown(TIMEOUT)?;
    Ok(())
}
