//! The figures of a run as rows of cells, for the terminal and for the report.

use super::model::{Figures, Job, ReplicaSample, Run, Sample};
use crate::units::{MIB, decimals, time};

/// Rows under a head; the first `left` columns are text, the others figures.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) left: usize,
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
}

/// What the guest got.
pub(super) fn guest(run: &Run) -> Table {
    let head = vec!["job", "", "IOPS", "MiB/s", "p50", "p99", "p99.9", "max"];
    let mut rows = Vec::new();
    for job in &run.jobs {
        if let Some(error) = &job.error {
            rows.push(vec![job.name.clone(), format!("ended early: {error}")]);
        } else if job.figures.is_empty() {
            rows.push(vec![job.name.clone(), "did nothing".to_owned()]);
        }
        rows.extend(job.figures.iter().map(|figures| figures_of(job, figures)));
    }
    Table { left: 2, head, rows: padded(rows, 8) }
}

fn figures_of(job: &Job, figures: &Figures) -> Vec<String> {
    let latencies = [figures.p50_us, figures.p99_us, figures.p999_us, figures.max_us];
    let mut row = vec![
        job.name.clone(),
        figures.direction.name().to_owned(),
        format!("{:.0}", figures.iops),
        decimals(figures.bytes_per_s / MIB),
    ];
    row.extend(latencies.map(|us| us.map_or_else(|| "-".to_owned(), time)));
    row
}

/// What the replicas did meanwhile: the largest and the mean of each.
pub(super) fn replicas(run: &Run) -> Table {
    let head = vec![
        "job",
        "replica",
        "jobs max",
        "mean",
        "MiB max",
        "mean",
        "lead max",
        "mean",
        "delay max",
        "mean",
        "active",
    ];
    let mut rows = Vec::new();
    for job in &run.jobs {
        let samples: Vec<&Sample> = run.samples_of(job).collect();
        for at in 0..run.replicas() {
            let of: Vec<&ReplicaSample> =
                samples.iter().filter_map(|sample| sample.replicas.get(at)).collect();
            if !of.is_empty() {
                rows.push(replica_row(&job.name, at, &of));
            }
        }
    }
    Table { left: 2, head, rows }
}

fn replica_row(job: &str, replica: usize, samples: &[&ReplicaSample]) -> Vec<String> {
    let mut row = vec![job.to_owned(), replica.to_string()];
    let mut both = |value: fn(&ReplicaSample) -> f64, show: fn(f64) -> String| {
        let values = samples.iter().map(|sample| value(sample));
        let (most, sum) = values.fold((0.0_f64, 0.0), |(most, sum), value| (most.max(value), sum + value));
        row.extend([show(most), show(sum / samples.len() as f64)]);
    };
    both(|sample| sample.queue_jobs as f64, |jobs| format!("{jobs:.0}"));
    both(|sample| sample.queue_bytes as f64 / MIB, decimals);
    both(|sample| sample.lead_us as f64, time);
    both(|sample| sample.delay_us as f64, time);
    let active = samples.iter().filter(|sample| sample.active).count();
    row.push(format!("{:.0}%", 100.0 * active as f64 / samples.len() as f64));
    row
}

/// Everything that a terminal is told.
pub(super) fn all(run: &Run) -> String {
    let mut out = format!("\n{}", text(&guest(run)));
    let replicas = replicas(run);
    if !replicas.rows.is_empty() {
        out.push_str(
            "\nwhat each replica owed, by how much it was ahead, and the delay put on its reads:\n\n",
        );
        out.push_str(&text(&replicas));
    }
    if !run.happenings.is_empty() {
        out.push('\n');
    }
    for told in &run.happenings {
        out.push_str(&format!("{:>8.1} s  {}\n", told.at_ms as f64 / 1e3, told.what));
    }
    if run.samples_missed > 0 {
        out.push_str(&format!("\nthe status did not answer {} times\n", run.samples_missed));
    }
    out
}

fn text(table: &Table) -> String {
    let mut widths: Vec<usize> = table.head.iter().map(|cell| cell.chars().count()).collect();
    for row in &table.rows {
        for (at, (width, cell)) in widths.iter_mut().zip(row).enumerate() {
            // A sentence in place of figures stretches no column.
            if at < table.left.saturating_sub(1) || !row.get(at + 1).is_some_and(String::is_empty) {
                *width = (*width).max(cell.chars().count());
            }
        }
    }
    let line = |cells: Vec<&str>| {
        let mut line = String::new();
        for (at, (cell, width)) in cells.into_iter().zip(&widths).enumerate() {
            let cell =
                if at < table.left { format!("{cell:<width$}  ") } else { format!("{cell:>width$}  ") };
            line.push_str(&cell);
        }
        format!("{}\n", line.trim_end())
    };
    let head = line(table.head.clone());
    table.rows.iter().fold(head, |out, row| out + &line(row.iter().map(String::as_str).collect()))
}

fn padded(rows: Vec<Vec<String>>, width: usize) -> Vec<Vec<String>> {
    let pad = |mut row: Vec<String>| {
        row.resize(width, String::new());
        row
    };
    rows.into_iter().map(pad).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_below_each_other() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let rows = vec![row(["a-long-name", "read", "1"]), row(["b", "ended early: a long reason", ""])];
        let table = Table { left: 2, head: vec!["job", "", "IOPS"], rows };
        assert_eq!(
            text(&table),
            "job                IOPS\na-long-name  read     1\nb            ended early: a long reason\n"
        );
    }
}
