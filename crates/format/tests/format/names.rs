//! Name records: the cases behind their golden vectors.

use sawmill_format::name_record::{self, NameRecord, NameStep};

use crate::samples::{Case, volume_record_value};

pub(crate) fn cases() -> Vec<Case> {
    vec![
        case("name_record/v1-claims", NameStep::Claims),
        case("name_record/v1-moves", NameStep::Moves { to: "disk2".to_owned(), number: 4 }),
        case("name_record/v1-ends", NameStep::Ends { status_pin: 2 }),
        case("name_record/v1-void", NameStep::Void),
    ]
}

fn case(name: &'static str, step: NameStep) -> Case {
    let value = NameRecord { number: 3, step, volume: volume_record_value() };
    Case {
        name,
        bytes: value.encode().unwrap(),
        value: format!("{value:#?}"),
        table: name_record::at::TABLE,
        decode: Box::new(move |bytes| Ok(NameRecord::decode(bytes, "disk1", 3)? == value)),
    }
}
