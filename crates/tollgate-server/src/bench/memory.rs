//! How much memory this process holds, where the system tells.

/// The resident set in bytes, from the system's own account of the process; `None` where there is none to be had.
pub(super) fn resident_bytes() -> Option<u64> {
    resident_in(&std::fs::read_to_string("/proc/self/status").ok()?)
}

fn resident_in(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_account_is_read() {
        assert_eq!(resident_in("Name:\ttollgate\nVmRSS:\t    1234 kB\nThreads:\t2\n"), Some(1234 * 1024));
        assert_eq!(resident_in("Name:\ttollgate\n"), None);
        assert_eq!(resident_in("VmRSS:\tmuch\n"), None);
    }
}
