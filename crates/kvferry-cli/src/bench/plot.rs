//! Rates over block sizes, one line per contender.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use plotters::coord::combinators::IntoLogRange;
use plotters::prelude::*;

use super::row::{Row, shown_bytes};
use crate::error::CliError;

/// Draws the best rates.
pub(crate) fn draw(path: &Path, rows: &[Row]) -> Result<(), CliError> {
    try_draw(path, rows).map_err(|error| CliError::Plot {
        path: path.display().to_string(),
        reason: error.to_string(),
    })
}

fn try_draw(path: &Path, rows: &[Row]) -> Result<(), Box<dyn Error>> {
    let mut lines: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows {
        let name = match row.contender.as_str() {
            "kvferry" => format!("kvferry, {}", row.lane),
            other => other.to_owned(),
        };
        let point = (row.block_bytes as f64, row.gb_per_s_best);
        lines.entry(name).or_default().push(point);
    }
    let sizes = || rows.iter().map(|row| row.block_bytes as f64);
    let (least, most) = (
        sizes().fold(f64::MAX, f64::min),
        sizes().fold(1.0, f64::max),
    );
    let fastest = rows.iter().map(|row| row.gb_per_s_best).fold(0.1, f64::max);
    let area = SVGBackend::new(path, (900, 540)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(20)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(
            (least / 1.3..most * 1.3).log_scale().base(2.0),
            0.0..fastest * 1.1,
        )?;
    chart
        .configure_mesh()
        .x_desc("bytes of a block")
        .y_desc("10^9 bytes per second, best")
        .x_label_formatter(&|bytes| shown_bytes(*bytes as u64))
        .draw()?;
    for (number, (name, points)) in lines.into_iter().enumerate() {
        let color = Palette99::pick(number).to_rgba();
        chart
            .draw_series(LineSeries::new(
                points.iter().copied(),
                color.stroke_width(2),
            ))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
        let dots = points
            .into_iter()
            .map(|at| Circle::new(at, 3, color.filled()));
        chart.draw_series(dots)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()?;
    Ok(())
}
