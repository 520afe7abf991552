//! The course of a forecast as SVG: four panels over time for each trace. Plain lines and texts,
//! readable on light and dark pages; no scripts, and nothing is fetched.
//!
//! Invariant: every text that the code does not fix goes through `escaped`, so a trace of any name
//! gives a well-formed document. Not here: which points of a trace are samples
//! (`sawmill_volume::forecast`).

use std::fmt::Write;

use sawmill_volume::forecast::Sample;

use super::play::TraceResult;

const PANEL_WIDTH: f64 = 440.0;
const PANEL_HEIGHT: f64 = 240.0;
/// Room around the plot of a panel: left, right, top, bottom.
const MARGINS: [f64; 4] = [64.0, 16.0, 32.0, 40.0];
const TITLE_HEIGHT: f64 = 32.0;
const TICKS: u32 = 4;
const COLORS: [&str; 2] = ["#1f77b4", "#d62728"];

/// A line of a panel: its name, and its value at a sample.
type ChartLine = (&'static str, fn(&Sample) -> f64);

/// A panel: its title, the unit of its values, its lines.
const PANELS: [(&str, &str, &[ChartLine]); 4] = [
    (
        "in the store",
        "MiB",
        &[
            ("live", |sample| mebibytes(sample.live_bytes)),
            ("all", |sample| mebibytes(sample.store_bytes)),
        ],
    ),
    ("write amplification", "", &[("so far", |sample| sample.write_amplification)]),
    ("extents of the map", "", &[("extents", |sample| sample.extents as f64)]),
    ("objects put", "", &[("so far", |sample| sample.puts as f64)]),
];

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 20) as f64
}

/// The document: a block of panels for each trace, one below the other.
pub(super) fn draw(results: &[TraceResult]) -> String {
    let titled: Vec<(String, &[Sample])> = results
        .iter()
        .map(|played| (played.path.display().to_string(), &played.report.samples[..]))
        .collect();
    draw_samples(&titled)
}

fn draw_samples(traces: &[(String, &[Sample])]) -> String {
    let block_height = TITLE_HEIGHT + 2.0 * PANEL_HEIGHT;
    let (width, height) = (2.0 * PANEL_WIDTH, block_height * traces.len() as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (row, (title, samples)) in traces.iter().enumerate() {
        let top = block_height * row as f64;
        text(&mut svg, (MARGINS[0], top + 22.0), "start", 15, title);
        for (number, panel) in PANELS.iter().enumerate() {
            let left = PANEL_WIDTH * (number % 2) as f64;
            let top = top + TITLE_HEIGHT + PANEL_HEIGHT * (number / 2) as f64;
            draw_panel(&mut svg, (left, top), panel, samples);
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn draw_panel(
    svg: &mut String,
    at: (f64, f64),
    panel: &(&str, &str, &[ChartLine]),
    samples: &[Sample],
) {
    let (title, unit, lines) = panel;
    let [margin_left, margin_right, margin_top, margin_bottom] = MARGINS;
    let (left, right) = (at.0 + margin_left, at.0 + PANEL_WIDTH - margin_right);
    let (top, bottom) = (at.1 + margin_top, at.1 + PANEL_HEIGHT - margin_bottom);
    let span_s = samples.last().map_or(0.0, |last| last.at.as_secs_f64());
    let (second, time_unit) = time_unit(span_s);
    let time_max = ceiling(span_s / second);
    let values = lines.iter().flat_map(|(_, value)| samples.iter().map(value));
    let value_max = ceiling(values.fold(0.0, f64::max));
    let x_of = |seconds: f64| left + (right - left) * (seconds / second / time_max);
    let y_of = |value: f64| bottom - (bottom - top) * (value / value_max);

    let unit_suffix = if unit.is_empty() { String::new() } else { format!(", {unit}") };
    text(svg, (left, top - 12.0), "start", 13, &format!("{title}{unit_suffix}"));
    text(svg, ((left + right) / 2.0, bottom + 32.0), "middle", 12, &format!("time, {time_unit}"));
    for tick in 0..=TICKS {
        let part = f64::from(tick) / f64::from(TICKS);
        let (at_y, at_x) = (y_of(part * value_max), left + (right - left) * part);
        line(svg, (left, at_y), (right, at_y), "#dddddd");
        text(svg, (left - 6.0, at_y + 4.0), "end", 11, &number(part * value_max));
        text(svg, (at_x, bottom + 16.0), "middle", 11, &number(part * time_max));
    }
    line(svg, (left, bottom), (right, bottom), "#444444");
    line(svg, (left, top), (left, bottom), "#444444");
    for (index, (name, value)) in lines.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let points =
            samples.iter().map(|sample| (x_of(sample.at.as_secs_f64()), y_of(value(sample))));
        let points: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let points = points.join(" ");
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\" points=\"{points}\"/>"
        );
        let legend = (right - 60.0 * (lines.len() - index) as f64, top - 16.0);
        line(svg, legend, (legend.0 + 16.0, legend.1), color);
        text(svg, (legend.0 + 20.0, legend.1 + 4.0), "start", 11, name);
    }
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), color: &str) {
    let ((x1, y1), (x2, y2)) = (from, to);
    // Writing to a string cannot fail.
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{color}\"/>"
    );
}

fn text(svg: &mut String, at: (f64, f64), anchor: &str, size: u32, content: &str) {
    let (x, y) = at;
    let content = escaped(content);
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" \
        font-size=\"{size}\">{content}</text>"
    );
}

/// Escapes a text for XML; control characters, most of which XML forbids, become question marks.
fn escaped(content: &str) -> String {
    let mut escaped = String::new();
    for character in content.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            // The title is the name of a file, which may contain anything.
            _ if character.is_control() => escaped.push('?'),
            _ => escaped.push(character),
        }
    }
    escaped
}

/// Seconds of the unit that suits a span, and its name.
fn time_unit(span_s: f64) -> (f64, &'static str) {
    match span_s {
        0.0..300.0 => (1.0, "seconds"),
        300.0..18_000.0 => (60.0, "minutes"),
        18_000.0..432_000.0 => (3600.0, "hours"),
        _ => (86_400.0, "days"),
    }
}

/// The smallest of 1, 2, 4 and 8 times a power of ten that is not below `value`, so that axes have
/// round ticks.
fn ceiling(value: f64) -> f64 {
    if value <= 0.0 {
        // An empty axis has a length, too: the scale divides by it.
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 4.0, 8.0, 10.0];
    // A little tolerance: a value that equals a step up to rounding must not take the next one.
    let fitting = steps.iter().map(|step| step * power).find(|end| *end >= value * (1.0 - 1e-9));
    fitting.unwrap_or(10.0 * power)
}

/// A number at a tick.
fn number(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        _ if value >= 1e6 => format!("{}M", trimmed(value / 1e6)),
        _ if value >= 1e4 => format!("{}k", trimmed(value / 1e3)),
        _ => trimmed(value),
    }
}

fn trimmed(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn samples() -> Vec<Sample> {
        let sample = |n: u64| Sample {
            at: Duration::from_secs(n * 600),
            written_bytes: n << 20,
            write_amplification: 0.5 + n as f64 / 10.0,
            live_bytes: n << 24,
            store_bytes: n << 25,
            extents: n * n * 100,
            puts: 3 * n,
        };
        (0..10).map(sample).collect()
    }

    /// The elements of a well-formed document; panics on any other.
    fn elements(svg: &str) -> Vec<String> {
        let (mut names, mut open) = (Vec::new(), Vec::new());
        let mut rest = svg;
        while let Some(at) = rest.find('<') {
            let before = &rest[..at];
            assert!(!before.contains('>'), "a stray '>' in {before:?}");
            let entities = before.match_indices('&').map(|(at, _)| &before[at..]);
            entities.for_each(|entity| {
                assert!(
                    ["&amp;", "&lt;", "&gt;"].iter().any(|known| entity.starts_with(known)),
                    "{entity}"
                );
            });
            let end = at + rest[at..].find('>').expect("a tag ends");
            let tag = &rest[at + 1..end];
            assert!(tag.matches('"').count().is_multiple_of(2), "quotes are closed in {tag}");
            let name = tag.trim_matches('/').split_whitespace().next().unwrap().to_owned();
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name));
            } else {
                if !tag.ends_with('/') {
                    open.push(name.clone());
                }
                names.push(name);
            }
            rest = &rest[end + 1..];
        }
        assert!(open.is_empty(), "{open:?} is never closed");
        names
    }

    #[test]
    fn a_chart_is_well_formed_and_says_what_it_shows() {
        let samples = samples();
        let svg = draw_samples(&[
            ("a <&> \"b\".csv".to_owned(), &samples),
            ("second".to_owned(), &samples),
        ]);
        let names = elements(&svg);
        let count = |name: &str| names.iter().filter(|found| *found == name).count();
        assert_eq!((count("svg"), count("polyline")), (1, 10));
        let words = [
            "a &lt;&amp;&gt; \"b\".csv",
            ">second<",
            ">in the store, MiB<",
            ">live<",
            ">all<",
            ">write amplification<",
            ">extents of the map<",
            ">objects put<",
            ">time, minutes<",
        ];
        words.iter().for_each(|word| assert!(svg.contains(word), "{word} is not in the chart"));
    }

    #[test]
    fn every_point_lies_inside_the_picture_and_one_sample_is_enough() {
        for samples in [samples(), samples()[9..].to_vec(), samples()[..1].to_vec(), Vec::new()] {
            let svg = draw_samples(&[("x".to_owned(), &samples)]);
            elements(&svg);
            for points in svg.split("points=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
                let numbers = points.split([' ', ',']).filter(|number| !number.is_empty());
                numbers.for_each(|number| {
                    let number: f64 = number.parse().unwrap();
                    assert!((0.0..=2.0 * PANEL_WIDTH).contains(&number), "{number}");
                });
            }
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn axes_end_at_round_numbers() {
        let ends = [
            (0.0, 1.0),
            (0.9, 1.0),
            (1.0, 1.0),
            (1.1, 2.0),
            (37.0, 40.0),
            (81.0, 100.0),
            (1234.0, 2000.0),
        ];
        ends.iter()
            .for_each(|(value, end)| assert!((ceiling(*value) - end).abs() < 1e-9, "{value}"));
        assert_eq!(
            (number(2500.0), number(0.25), number(20_000.0)),
            ("2500".into(), "0.25".into(), "20k".into())
        );
        assert_eq!(number(1_500_000.0), "1.5M");
    }
}
