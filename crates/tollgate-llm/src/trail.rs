//! The trail: one JSON line for each attempt, and one for each request that had to wait or was refused.
//!
//! Lines go through a bounded queue to a thread of their own, so that no call waits for a disk; what does not fit, or cannot be written,
//! is dropped and counted. A line is one write at the end of the file, so that after a kill the file has whole lines only. A file of 64 MiB is put
//! aside as `.1`, and the one before is removed. No prompt, no answer and no key is ever written.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;

use serde::Serialize;

/// How many lines may wait to be written.
const QUEUED: usize = 8 * 1024;

/// From how many bytes on a file is put aside.
const ROTATED: u64 = 64 * 1024 * 1024;

/// A line of the trail.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TrailLine {
    /// When, in RFC 3339 and UTC.
    pub timestamp: String,
    /// The model that was asked.
    pub model: String,
    /// Who is behind the call.
    pub agent_id: String,
    /// The request.
    pub request_id: String,
    /// All input tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_tokens: Option<u64>,
    /// All output tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<u64>,
    /// Both.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_tokens: Option<u64>,
    /// Why it waited, was refused or failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How long the limit asked it to wait; absent for never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_seconds: Option<f64>,
    /// Of an attempt `success`, `left` by its client, `broken` off, or `error`; of a request that had to wait or was refused `rate_limited`.
    pub status: &'static str,
    /// Which attempt of its request it was, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// What its input was reckoned at before it was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimated_input: Option<u64>,
    /// What was reserved for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<u64>,
    /// The input tokens that were read from a cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// Where the tokens are from: `reported` by the provider, or `estimated`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<&'static str>,
    /// The status that the provider answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_status: Option<u16>,
    /// The quota group whose key was used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// How long the attempt took, from when it was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
}

/// Writes lines from a thread of its own.
pub struct Trail {
    queue: Option<SyncSender<Message>>,
    dropped: Arc<AtomicU64>,
    writer: Option<JoinHandle<()>>,
}

enum Message {
    Line(Vec<u8>),
    Flush(Arc<Barrier>),
}

impl Trail {
    /// Below a directory, as `gateway/rate_limits.jsonl`. What is missing is made.
    pub fn open(log_dir: &Path) -> io::Result<Trail> {
        let directory = log_dir.join("gateway");
        std::fs::create_dir_all(&directory)?;
        let mut file = TrailFile::open(directory.join("rate_limits.jsonl"), ROTATED)?;
        let (queue, lines) = sync_channel(QUEUED);
        let dropped = Arc::<AtomicU64>::default();
        let counted = dropped.clone();
        let writer = std::thread::Builder::new()
            .name("tollgate-trail".into())
            .spawn(move || write(&mut file, &lines, &counted))?;
        Ok(Trail { queue: Some(queue), dropped, writer: Some(writer) })
    }

    /// Writes a line some time soon. It is dropped and counted if too many wait already; the first time, a warning says so.
    pub fn write(&self, line: &TrailLine) {
        let Ok(mut bytes) = serde_json::to_vec(line) else { return };
        bytes.push(b'\n');
        let queued = self.queue.as_ref().map(|queue| queue.try_send(Message::Line(bytes)));
        if !matches!(queued, Some(Ok(()))) && self.dropped.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                target: "tollgate::llm",
                queued = QUEUED,
                "the disk is too slow for the trail of language-model calls: lines are dropped and counted"
            );
        }
    }

    /// How many lines were dropped because the disk was too slow or did not take them.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Waits until all lines so far are written: for tests and for the end of a program.
    pub fn flush(&self) {
        let barrier = Arc::new(Barrier::new(2));
        if let Some(queue) = &self.queue
            && queue.send(Message::Flush(barrier.clone())).is_ok()
        {
            barrier.wait();
        }
    }
}

impl Drop for Trail {
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

fn write(file: &mut TrailFile, lines: &Receiver<Message>, dropped: &AtomicU64) {
    let mut is_reported = false;
    while let Ok(first) = lines.recv() {
        let mut batch = Vec::new();
        let mut flushed = Vec::new();
        let mut count = 0;
        for message in std::iter::once(first).chain(lines.try_iter().take(256)) {
            match message {
                Message::Line(bytes) => {
                    batch.extend_from_slice(&bytes);
                    count += 1;
                }
                Message::Flush(barrier) => flushed.push(barrier),
            }
        }
        match file.append(&batch) {
            Ok(()) => is_reported = false,
            Err(error) => {
                dropped.fetch_add(count, Ordering::Relaxed);
                if !std::mem::replace(&mut is_reported, true) {
                    tracing::error!(%error, "the trail of language-model calls cannot be written");
                }
            }
        }
        for barrier in flushed {
            barrier.wait();
        }
    }
}

struct TrailFile {
    path: PathBuf,
    file: File,
    length: u64,
    /// From how many bytes on it is put aside.
    most: u64,
}

impl TrailFile {
    fn open(path: PathBuf, most: u64) -> io::Result<TrailFile> {
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        let length = file.metadata()?.len();
        Ok(TrailFile { path, file, length, most })
    }

    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        if self.length > 0 && self.length + lines.len() as u64 > self.most {
            std::fs::rename(&self.path, self.path.with_extension("jsonl.1"))?;
            *self = TrailFile::open(self.path.clone(), self.most)?;
        }
        self.file.write_all(lines)?;
        self.length += lines.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_written_in_order_and_whole() {
        let home = tempfile::tempdir().expect("a directory");
        let trail = Trail::open(home.path()).expect("a trail");
        for number in 0..100 {
            let line =
                TrailLine { request_id: format!("r{number}"), status: "success", ..TrailLine::default() };
            trail.write(&line);
        }
        trail.flush();
        let text = std::fs::read_to_string(home.path().join("gateway/rate_limits.jsonl")).expect("a file");
        let ids: Vec<String> = text
            .lines()
            .map(|line| {
                serde_json::from_str::<serde_json::Value>(line).expect("JSON")["request_id"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned()
            })
            .collect();
        assert_eq!(ids, (0..100).map(|number| format!("r{number}")).collect::<Vec<_>>());
        assert_eq!(trail.dropped(), 0);
        drop(trail);
        // Another process goes on in the same file.
        let trail = Trail::open(home.path()).expect("a trail");
        trail.write(&TrailLine::default());
        drop(trail);
        let text = std::fs::read_to_string(home.path().join("gateway/rate_limits.jsonl")).expect("a file");
        assert_eq!(text.lines().count(), 101);
    }

    #[test]
    fn what_the_disk_is_too_slow_for_is_dropped_and_counted() {
        let home = tempfile::tempdir().expect("a directory");
        let trail = Trail::open(home.path()).expect("a trail");
        // The writer waits, as for a disk, until the test says so.
        let disk = Arc::new(Barrier::new(2));
        let queue = trail.queue.as_ref().expect("a queue");
        assert!(queue.send(Message::Flush(disk.clone())).is_ok());
        let mut written = 0;
        while trail.dropped() < 2 {
            trail.write(&TrailLine::default());
            written += 1;
        }
        disk.wait();
        // The message that makes the writer wait is still in the queue, or the writer has taken it out with some lines behind it.
        assert!((QUEUED - 1..=QUEUED + 256).contains(&(written - 2)), "{written}");
        trail.flush();
        let text = std::fs::read_to_string(home.path().join("gateway/rate_limits.jsonl")).expect("a file");
        assert_eq!(text.lines().count(), written - 2, "all others are there");
    }

    #[test]
    fn g1_a_long_trail_is_put_aside_whole() {
        let home = tempfile::tempdir().expect("a directory");
        let path = home.path().join("rate_limits.jsonl");
        let mut file = TrailFile::open(path.clone(), 25).expect("a file");
        for number in 0..7 {
            file.append(format!("{{\"n\":{number}}}\n").as_bytes()).expect("written");
        }
        let read = |path: &Path| std::fs::read_to_string(path).expect("a file");
        let aside = path.with_extension("jsonl.1");
        assert_eq!(
            read(&aside),
            "{\"n\":3}\n{\"n\":4}\n{\"n\":5}\n",
            "the newest three, and older ones are gone"
        );
        assert_eq!(read(&path), "{\"n\":6}\n");
        file.append(&[b'x'; 100]).expect("a line that is longer than a file");
        assert_eq!(read(&path).len(), 100);
    }
}
