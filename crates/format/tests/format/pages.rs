//! The pages in `docs/format/` agree with the code.

use std::fs;

use sawmill_format::layout::Table;
use sawmill_format::map_part::part_key;
use sawmill_format::preamble::Kind;
use sawmill_format::{
    boot_set, cache_index, checkpoint, export_state, journal, kept_block, link, map_part,
    name_record, newest_state, packed_write, preamble, role, segment, staging, transfer,
    volume_record, write_log,
};

use crate::samples::{CHECKPOINT, PART, PUT, SEGMENT, VOLUME};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/format");

const PAGES: [(&str, &[Table]); 18] = [
    ("preamble.md", &[preamble::at::TABLE]),
    ("volume_record.md", &[volume_record::at::TABLE]),
    (
        "segment.md",
        &[
            segment::at::TABLE,
            segment::extent_at::TABLE,
            segment::frame_at::TABLE,
            segment::origin_at::TABLE,
            segment::head_at::TABLE,
            segment::place_at::TABLE,
        ],
    ),
    (
        "checkpoint.md",
        &[checkpoint::at::TABLE, checkpoint::segment_at::TABLE, checkpoint::part_at::TABLE],
    ),
    (
        "kept.md",
        &[
            kept_block::kept_at::TABLE,
            kept_block::cut_at::TABLE,
            kept_block::lineage_at::TABLE,
            kept_block::dead_at::TABLE,
            kept_block::order_at::TABLE,
            kept_block::pin_at::TABLE,
        ],
    ),
    ("map_part.md", &[map_part::at::TABLE]),
    ("name_record.md", &[name_record::at::TABLE]),
    ("role.md", &[role::at::TABLE]),
    ("boot_set.md", &[boot_set::at::TABLE, boot_set::range_at::TABLE]),
    ("journal.md", &[journal::superblock_at::TABLE, journal::record_at::TABLE]),
    ("staging.md", &[staging::at::TABLE, staging::numbers_at::TABLE]),
    ("cache_index.md", &[cache_index::at::TABLE, cache_index::entry_at::TABLE]),
    ("transfer_progress.md", &[transfer::at::TABLE]),
    ("export_state.md", &[export_state::at::TABLE]),
    ("newest_state.md", &[newest_state::at::TABLE]),
    (
        "link.md",
        &[
            link::packet_at::TABLE,
            link::greeting::hello_at::TABLE,
            link::greeting::welcome_at::TABLE,
            link::greeting::cookie_at::TABLE,
            link::greeting::seek_at::TABLE,
            link::statement::command_at::TABLE,
            link::statement::data_at::TABLE,
            link::statement::reply_at::TABLE,
            link::statement::ack_at::TABLE,
            link::statement::run_at::TABLE,
            link::statement::note_at::TABLE,
            link::statement::close_at::TABLE,
            link::control::opened_at::TABLE,
            link::control::list_at::TABLE,
            link::control::export_at::TABLE,
        ],
    ),
    ("packed_write.md", &[packed_write::at::TABLE, packed_write::entry_at::TABLE]),
    ("write_log.md", &[write_log::superblock_at::TABLE, write_log::entry_at::TABLE]),
];

fn page(name: &str) -> String {
    fs::read_to_string(format!("{FOLDER}/{name}")).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The cells of a table row.
fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(str::trim).collect())
}

/// Title and rows (offset, size, name, meaning) of every layout table of a page.
fn layout_tables(page: &str) -> Vec<(String, Vec<Vec<&str>>)> {
    let (mut tables, mut title, mut inside) = (Vec::<(String, Vec<Vec<&str>>)>::new(), "", false);
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix('#') {
            title = heading.trim_start_matches('#').trim();
        }
        match cells(line) {
            None => inside = false,
            Some(row) if row == ["offset", "size", "name", "meaning"] => {
                inside = true;
                tables.push((title.to_owned(), Vec::new()));
            }
            Some(row) if inside && !row[0].starts_with('-') => {
                tables.last_mut().unwrap().1.push(row);
            }
            Some(_) => {}
        }
    }
    tables
}

#[test]
fn every_row_of_every_page_is_a_field_of_the_code() {
    for (name, tables) in PAGES {
        let page = page(name);
        let found = layout_tables(&page);
        let titles: Vec<_> = found.iter().map(|(title, _)| title.as_str()).collect();
        assert_eq!(titles, tables.iter().map(|table| table.title).collect::<Vec<_>>(), "{name}");
        for ((title, rows), table) in found.iter().zip(tables) {
            let rows_of_code: Vec<_> = table
                .fields
                .iter()
                .map(|field| {
                    [field.offset.to_string(), field.size.to_string(), format!("`{}`", field.name)]
                })
                .collect();
            let rows_of_page: Vec<_> =
                rows.iter().map(|row| [0, 1, 2].map(|cell| row[cell].to_owned())).collect();
            assert_eq!(rows_of_page, rows_of_code, "{name}, {title}");
            for row in rows {
                assert!(
                    row.len() == 4 && !row[3].is_empty(),
                    "{name}, {title}: {} has no meaning",
                    row[2]
                );
            }
        }
    }
}

#[test]
fn every_page_is_compared() {
    let mut known_names: Vec<_> = PAGES.iter().map(|(name, _)| *name).collect();
    known_names.push("README.md");
    // It is not on any disk: `sawmill-frontend` has its code and compares its example.
    known_names.push("hand_over.md");
    // Nor do these: `sawmill-driver` compares them.
    known_names.extend(["driver.md", "write_chunk.md"]);
    // That of the kernel module, in C: `tests/vm/buse/interface.sh` looks at its bytes.
    known_names.push("buse_device.md");
    for file in fs::read_dir(FOLDER).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        assert!(
            !name.ends_with(".md") || known_names.contains(&name.as_str()),
            "{name} is compared with nothing"
        );
    }
}

#[test]
fn the_overview_lists_every_kind() {
    let overview = page("README.md");
    for kind in Kind::ALL {
        let row = format!("| {} | {} |", kind as u16, kind.name());
        assert!(overview.contains(&row), "README.md has no row {row}");
    }
}

#[test]
fn the_overview_shows_keys_as_the_code_makes_them() {
    let overview = page("README.md");
    let keys = [
        name_record::name_key("disk1", 1),
        volume_record::volume_key("disk1"),
        segment::segment_key(VOLUME, SEGMENT.sequence),
        checkpoint::checkpoint_key(VOLUME, CHECKPOINT.number),
        checkpoint::kept_key(VOLUME, 8, PUT),
        kept_block::pin_key(VOLUME, 3),
        kept_block::released_key(VOLUME, 3),
        kept_block::status_pin_key(VOLUME, 1),
        kept_block::tombstone_key(VOLUME),
        role::role_key(VOLUME, 1),
        part_key(&PART),
    ];
    for key in keys {
        assert!(overview.contains(&format!("`{key}`")), "README.md does not show {key}");
    }
}
