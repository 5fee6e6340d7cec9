//! Pools: what they are made of, and what is refused.

use super::*;
use rustix::fs::{fcntl_get_seals, ftruncate};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

#[test]
fn a_pool_is_zeroed_sealed_and_of_the_size_asked_for() {
    let pool = HostPool::new(10_000).unwrap();
    assert_eq!(pool.bytes(), 10_000);
    assert_eq!(pool.page_bytes(), rustix::param::page_size() as u64);
    let mut out = vec![1; 10_000];
    pool.region().unwrap().read_at(0, &mut out).unwrap();
    assert!(out.iter().all(|&byte| byte == 0));
    assert!(
        fcntl_get_seals(pool.fd())
            .unwrap()
            .contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
    );
    assert!(ftruncate(pool.fd(), 1).is_err());
}

/// Maps a whole pool as a peer would who has its descriptor, and says how that went.
fn map_again(pool: &HostPool, protection: ProtFlags) -> rustix::io::Result<()> {
    let length = pool.map.len();
    // SAFETY: a new mapping at a place of the kernel's choice; nothing is read or written through it.
    let address = unsafe {
        mmap(
            std::ptr::null_mut(),
            length,
            protection,
            MapFlags::SHARED,
            pool.fd(),
            0,
        )
    }?;
    // SAFETY: mapped above, whole, and used by nobody.
    unsafe { munmap(address, length) }
}

/// A peer gets the descriptor: it may read all of it, and change nothing.
#[test]
fn a_pool_cannot_be_mapped_for_writing_by_others() {
    let pool = HostPool::new(10_000).unwrap();
    let seals = fcntl_get_seals(pool.fd()).unwrap();
    assert!(
        seals.contains(SealFlags::FUTURE_WRITE),
        "this test needs Linux 5.1"
    );
    map_again(&pool, ProtFlags::READ).unwrap();
    let refused = map_again(&pool, ProtFlags::READ | ProtFlags::WRITE).unwrap_err();
    assert_eq!(refused, rustix::io::Errno::PERM);
    assert_eq!(
        rustix::io::pwrite(pool.fd(), b"x", 0).unwrap_err(),
        rustix::io::Errno::PERM
    );
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(
        fallocate(pool.fd(), hole, 0, 4096).unwrap_err(),
        rustix::io::Errno::PERM
    );
    // Our own mapping writes.
    let region = pool.region().unwrap();
    region.write_at(9_000, b"kvferry").unwrap();
    let mut out = [0; 7];
    region.read_at(9_000, &mut out).unwrap();
    assert_eq!(&out, b"kvferry");
}

#[test]
fn a_pool_that_does_not_fit_is_an_error_with_its_size() {
    let error = HostPool::new(1 << 60).unwrap_err();
    assert!(
        matches!(error, MemoryError::NoMemory { bytes, .. } if bytes == 1 << 60),
        "{error}"
    );
    assert!(matches!(
        HostPool::new(0).unwrap_err(),
        MemoryError::Empty { .. }
    ));
}

#[test]
fn meminfo_is_read_in_bytes() {
    let text = "MemTotal:       16384 kB\nMemAvailable:       8192 kB\nBuffers: 1 kB\n";
    assert_eq!(meminfo_available(text), Some(8 << 20));
    assert_eq!(meminfo_available("MemAvailable: many\n"), None);
    assert_eq!(meminfo_available(""), None);
}

#[test]
fn a_region_keeps_its_pool_alive() {
    let region = HostPool::new(4096).unwrap().region().unwrap();
    region.write_at(0, b"x").unwrap();
    let part = region.part(0, 1).unwrap();
    assert_eq!(Arc::strong_count(region.pool().unwrap()), 2);
    drop(region);
    let mut out = [0];
    part.read_at(0, &mut out).unwrap();
    assert_eq!(&out, b"x");
}

#[test]
fn a_size_of_huge_pages_that_there_is_not_is_an_error_that_names_the_others() {
    let options = |huge_pages| HostPoolOptions {
        huge_pages,
        huge_page_bytes: Some(3 << 20),
    };
    let error = HostPool::with_options(1, options(HugePages::Require)).unwrap_err();
    let sizes = huge::sizes();
    assert!(
        matches!(&error, MemoryError::HugePageSize { wanted, sizes: found }
            if *wanted == 3 << 20 && *found == sizes),
        "{error}"
    );
    for size in sizes {
        assert!(error.to_string().contains(&size.to_string()), "{error}");
    }
    let pool = HostPool::with_options(1, options(HugePages::IfAvailable)).unwrap();
    assert_eq!(pool.page_bytes(), rustix::param::page_size() as u64);
}

/// More than there are, by far: an error with both numbers, or ordinary pages.
#[test]
fn huge_pages_that_are_not_free_are_an_error_with_need_and_number() {
    let page = huge::default_size().expect("this test needs a kernel with huge pages");
    let free = huge::obtainable(page).unwrap();
    // Tests beside this one may allow some more.
    let bytes = ((free + 1000) * page - 5) as usize;
    let options = |huge_pages| HostPoolOptions {
        huge_pages,
        huge_page_bytes: None,
    };
    let error = HostPool::with_options(bytes, options(HugePages::Require)).unwrap_err();
    let MemoryError::HugePages {
        need, page_bytes, ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!((need, page_bytes), (free + 1000, page));
    let text = error.to_string();
    assert!(
        text.contains("are free") && text.contains("nr_hugepages"),
        "{text}"
    );
}
