//! A reader in another language, written from the page alone, agrees with the code.

use std::process::{Command, Output};

use sawmill_format::segment::{ExtentKind, SegmentHeader};

use crate::samples::{
    fence_value, moved_value, order_value, segment_data, segment_object, segment_value,
};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/format/read_segment.py");
const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors/segment");

fn read(path: &str) -> Output {
    let output = Command::new("python3").arg("-B").arg(SCRIPT).arg(path).output();
    output
        .unwrap_or_else(|error| panic!("this test needs python3 (standard library only): {error}"))
}

/// What the script prints for this segment.
fn expected(header: &SegmentHeader, data: &[u8]) -> String {
    let mut text = format!(
        "volume {} sequence {} epoch {} kind {}\npositions {} to {}, data {} bytes in {} frames\n",
        header.volume_id,
        header.sequence,
        header.epoch,
        header.kind as u8,
        header.position_start,
        header.position_end,
        header.data_bytes,
        header.frames.len(),
    );
    if header.size_bytes > 0 {
        text += &format!("disk {} bytes\n", header.size_bytes);
    }
    for (number, extent) in header.extents.iter().enumerate() {
        let kind = match extent.kind {
            ExtentKind::Data => "data",
            ExtentKind::Zero => "zero",
            ExtentKind::Discard => "discard",
        };
        text += &format!("{kind} address {} length {}", extent.address, extent.length);
        if let Some(origin) = header.origins.get(number) {
            text += &format!(" from {}+{}", origin.sequence, origin.data_offset);
        }
        if extent.kind == ExtentKind::Data {
            let bytes = &data[extent.data_offset as usize..][..extent.length as usize];
            text += " bytes ";
            text.extend(bytes.iter().map(|byte| format!("{byte:02x}")));
        }
        text += "\n";
    }
    text
}

#[test]
fn the_python_reader_reads_the_golden_segments() {
    let (order, order_data) = order_value();
    let golden = [
        ("v1-data", segment_value(), segment_data()),
        ("v1-moved", moved_value(), segment_data()),
        ("v1-fence", fence_value(0), Vec::new()),
        ("v2-fence", fence_value(10 << 30), Vec::new()),
        ("v1-order", order, order_data),
    ];
    for (name, header, data) in golden {
        let output = read(&format!("{VECTORS}/{name}.bin"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected(&header, &data));
    }
}

#[test]
fn the_python_reader_refuses_a_damaged_header_and_a_damaged_frame() {
    let object = segment_object(&segment_value(), &segment_data());
    let header_bytes = segment_value().header_bytes() as usize;
    let damages =
        [(6, "version"), (60, "header checksum"), (header_bytes + 20, "frame 0 checksum")];
    for (place, message) in damages {
        let mut damaged = object.clone();
        damaged[place] ^= 1;
        let path = std::env::temp_dir()
            .join(format!("sawmill-damaged-{}-{place}.bin", std::process::id()));
        std::fs::write(&path, damaged).unwrap();
        let output = read(path.to_str().unwrap());
        std::fs::remove_file(&path).unwrap();
        assert!(!output.status.success());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains(message), "{error}");
    }
}
