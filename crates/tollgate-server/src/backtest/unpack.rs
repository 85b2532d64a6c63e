//! Logs in gzip and zstd, found by their first bytes and unpacked as they are read.
//!
//! Nothing is held but what the formats look back on: 32 KiB for gzip, at most 128 MiB for zstd, whose frames with a larger window
//! are refused. A file may have several members (gzip) or frames (zstd), one after the other, as rotation and parallel packers write them.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use crate::failure::reason;

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// How much is unpacked at once.
const BUFFER: usize = 256 * 1024;

/// The largest window of zstd: what `zstd` itself takes without being asked.
const LARGEST_WINDOW: u64 = 128 * 1024 * 1024;

/// The same input, unpacked if it is packed.
pub(super) fn unpacked(mut input: Box<dyn BufRead>) -> io::Result<Box<dyn BufRead>> {
    let mut magic = [0; 4];
    let seen = input.fill_buf()?;
    // A pipe may bring the first bytes one by one; a file brings them all, and then nothing need stand before it.
    let (known, taken) = if seen.len() >= magic.len() {
        magic.copy_from_slice(&seen[..4]);
        (magic.len(), 0)
    } else {
        let mut known = 0;
        while known < magic.len() {
            match input.read(&mut magic[known..])? {
                0 => break,
                count => known += count,
            }
        }
        (known, known)
    };
    let input: Box<dyn BufRead> = match taken {
        0 => input,
        _ => Box::new(io::Cursor::new(magic[..taken].to_vec()).chain(input)),
    };
    let buffered = |packed: Box<dyn Read>, format| -> Box<dyn BufRead> {
        Box::new(BufReader::with_capacity(BUFFER, Packed { packed, format }))
    };
    Ok(match &magic[..known] {
        [a, b, ..] if [*a, *b] == GZIP => buffered(Box::new(MultiGzDecoder::new(input)), "gzip"),
        start if start == ZSTD || is_skippable(start) => buffered(Box::new(Zstd::new(input)), "zstd"),
        _ => input,
    })
}

/// A frame of zstd that has no data, and may stand before one that has.
fn is_skippable(start: &[u8]) -> bool {
    matches!(start, [0x50..=0x5f, 0x2a, 0x4d, 0x18])
}

/// Says which format is damaged.
struct Packed {
    packed: Box<dyn Read>,
    format: &'static str,
}

impl Read for Packed {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.packed.read(into).map_err(|error| match error.kind() {
            io::ErrorKind::Interrupted => error,
            kind => {
                let (format, why) = (self.format, reason(&error));
                io::Error::new(kind, format!("its {format} data is damaged or cut off ({why})"))
            }
        })
    }
}

/// The frames of a zstd file.
struct Zstd<R> {
    input: R,
    decoder: FrameDecoder,
    is_in_frame: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(input: R) -> Zstd<R> {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(LARGEST_WINDOW);
        Zstd { input, decoder, is_in_frame: false }
    }

    /// Begins the next frame that has data; `false` at the end.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.input.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.input) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut self.input.by_ref().take(length), &mut io::sink())?;
                    if skipped < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(damaged(error)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.is_in_frame {
                if into.is_empty() || !self.begin()? {
                    return Ok(0);
                }
                self.is_in_frame = true;
            }
            if self.decoder.can_collect() > 0 {
                return self.decoder.read(into);
            }
            if !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.input, one).map_err(damaged)?;
                continue;
            }
            self.is_in_frame = false;
            let written = self.decoder.get_checksum_from_data();
            if written.is_some() && written != self.decoder.get_calculated_checksum() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "its checksum is wrong"));
            }
        }
    }
}

fn damaged(error: FrameDecoderError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(text: &[u8]) -> Vec<u8> {
        compress_to_vec(text, CompressionLevel::Fastest)
    }

    /// What comes out, brought in pieces of a size.
    fn read(bytes: &[u8], piece: usize) -> io::Result<Vec<u8>> {
        let input = BufReader::with_capacity(piece, io::Cursor::new(bytes.to_vec()));
        let mut out = Vec::new();
        unpacked(Box::new(input))?.read_to_end(&mut out)?;
        Ok(out)
    }

    #[test]
    fn files_come_out_as_they_were_packed() {
        let long: Vec<u8> = (0..300_000u32).flat_map(|n| n.to_string().into_bytes()).collect();
        let skippable = [&[0x52, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 9, 9, 9][..], &zstd(b"b\n")].concat();
        for (bytes, expected) in [
            (b"".to_vec(), &b""[..]),
            (b"a".to_vec(), b"a"),
            (b"time,limit\n".to_vec(), b"time,limit\n"),
            (gzip(b"a\nb\n"), b"a\nb\n"),
            ([gzip(b"a\n"), gzip(b""), gzip(b"b\n")].concat(), b"a\nb\n"),
            (gzip(&long), &long),
            (zstd(b"a\nb\n"), b"a\nb\n"),
            ([zstd(b"a\n"), zstd(b""), skippable.clone()].concat(), b"a\nb\n"),
            (skippable, b"b\n"),
            (zstd(&long), &long),
        ] {
            for piece in [1, 3, 4, 8192] {
                let found = read(&bytes, piece).unwrap_or_else(|error| panic!("{error}: {bytes:.40?}"));
                assert!(found == expected, "{} bytes by {piece}", bytes.len());
            }
        }
    }

    #[test]
    fn what_is_cut_off_or_damaged_is_an_error_and_no_panic() {
        let long: Vec<u8> = (0..5_000u32).flat_map(|n| n.to_string().into_bytes()).collect();
        for (packed, format) in [(gzip(&long), "gzip"), (zstd(&long), "zstd")] {
            for end in [5, packed.len() / 2, packed.len() - 1] {
                let error = read(&packed[..end], 8192).expect_err(format).to_string();
                let message = format!("its {format} data is damaged or cut off (");
                assert!(error.starts_with(&message), "{end}: {error}");
            }
            let mut checksum = packed.clone();
            let at = checksum.len() - if format == "gzip" { 8 } else { 4 };
            checksum[at] ^= 1;
            assert!(read(&checksum, 8192).is_err(), "{format}: a wrong checksum");
        }
        // A window of 1 TiB, of which nobody has a byte.
        let large = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xf0, 0x01, 0x00, 0x00];
        assert!(read(&large, 8192).unwrap_err().to_string().contains("zstd data is damaged"));
    }

    /// A thousand to one: what unfolds to 64 MiB is read through a small buffer.
    #[test]
    fn what_unfolds_to_much_is_streamed() {
        let bomb = gzip(&vec![b'\n'; 64 << 20]);
        assert!(bomb.len() < 1 << 20);
        let mut input = unpacked(Box::new(io::Cursor::new(bomb))).unwrap();
        let mut bytes = 0;
        loop {
            let read = input.fill_buf().unwrap().len();
            assert!(read <= BUFFER);
            if read == 0 {
                break;
            }
            bytes += read;
            input.consume(read);
        }
        assert_eq!(bytes, 64 << 20);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(kind in 0..3, mut bytes in proptest::collection::vec(any::<u8>(), 0..200), at in any::<usize>(), flip in 1u8..) {
            if kind > 0 {
                bytes = if kind == 1 { gzip(&bytes) } else { zstd(&bytes) };
                let at = at % bytes.len();
                bytes[at] ^= flip;
            }
            let _ = read(&bytes, 16);
        }
    }
}
