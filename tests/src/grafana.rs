//! A dashboard as Grafana reads it: the queries of its panels, and its variables with what is put in their place.
//!
//! Invariants:
//! - Nothing that is asked for is passed over: every `expr` at any depth is a query.
//! - A variable that nobody knows is an error and never left in a query.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use crate::prometheus::Labels;

/// One line of a panel, or as many as it has series.
#[derive(Clone, Debug)]
pub struct Query {
    pub panel: String,
    pub expression: String,
    pub legend: String,
}

/// A variable that is filled by a query.
#[derive(Clone, Debug)]
pub struct Variable {
    pub name: String,
    pub query: String,
    /// Several values at once, or all.
    pub many: bool,
}

/// What stands for each variable in a query.
pub type Chosen = BTreeMap<String, String>;

#[derive(Debug)]
pub struct Dashboard(Value);

impl Dashboard {
    /// # Panics
    /// If it isn't JSON.
    #[track_caller]
    pub fn parse(text: &str) -> Self {
        Self(serde_json::from_str(text).unwrap_or_else(|error| panic!("the dashboard is no JSON: {error}")))
    }

    pub fn queries(&self) -> Vec<Query> {
        let mut queries = Vec::new();
        collect(&self.0, "", &mut queries);
        queries
    }

    /// In the order in which they depend on one another.
    pub fn variables(&self) -> Vec<Variable> {
        let list = self.0["templating"]["list"].as_array().map_or(&[][..], Vec::as_slice);
        let flag = |json: &Value| json.as_bool().unwrap_or_default();
        let variable = |json: &Value| Variable {
            name: text(&json["name"]),
            query: text(&json["query"]["query"]),
            many: flag(&json["multi"]) || flag(&json["includeAll"]),
        };
        list.iter().filter(|json| json["type"] == "query").map(variable).collect()
    }
}

fn collect(json: &Value, panel: &str, queries: &mut Vec<Query>) {
    match json {
        Value::Object(map) => {
            let panel = json["title"].as_str().unwrap_or(panel);
            if let Some(expression) = map.get("expr") {
                queries.push(Query {
                    panel: panel.to_owned(),
                    expression: text(expression),
                    legend: text(&json["legendFormat"]),
                });
            }
            map.values().for_each(|value| collect(value, panel, queries));
        }
        Value::Array(list) => list.iter().for_each(|value| collect(value, panel, queries)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn text(json: &Value) -> String {
    json.as_str().unwrap_or_default().to_owned()
}

impl Variable {
    /// Selector and label of `label_values(SELECTOR, LABEL)`.
    pub fn label_values(&self) -> Option<(&str, &str)> {
        let inner = self.query.strip_prefix("label_values(")?.strip_suffix(')')?;
        let (selector, label) = inner.rsplit_once(',')?;
        Some((selector.trim(), label.trim()))
    }

    /// What stands for it when everything is chosen that can be: of a variable with one value the first, as it is; of others all, as
    /// a pattern.
    pub fn choose(&self, values: &[String]) -> String {
        if !self.many {
            return values.first().cloned().unwrap_or_default().replace('\\', "\\\\");
        }
        let patterns: Vec<String> = values.iter().map(|value| literal(value)).collect();
        match patterns.as_slice() {
            [one] => one.clone(),
            several => format!("({})", several.join("|")),
        }
    }
}

/// A pattern within a string that matches `text` alone.
fn literal(text: &str) -> String {
    let mut out = String::new();
    for char in text.chars() {
        match char {
            '\\' => out.push_str("\\\\\\\\"),
            '$' | '^' | '*' | '{' | '}' | '[' | ']' | '\'' | '+' | '?' | '.' | '(' | ')' | '|' => {
                out.push_str("\\\\");
                out.push(char);
            }
            other => out.push(other),
        }
    }
    out
}

/// `$__rate_interval` of a panel whose points are `interval` apart.
pub fn rate_interval(interval: Duration, scrape_every: Duration) -> String {
    format!("{}s", (interval + scrape_every).max(scrape_every * 4).as_secs())
}

/// A query with every `$name` and `${name}` replaced.
///
/// # Errors
/// If there is no such variable.
pub fn interpolate(text: &str, chosen: &Chosen) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        let (name, behind) = match after.strip_prefix('{') {
            Some(braced) => braced.split_once('}').ok_or_else(|| format!("no end of ${{ in {text}"))?,
            None => after.split_at(
                after.find(|char: char| !char.is_ascii_alphanumeric() && char != '_').unwrap_or(after.len()),
            ),
        };
        out.push_str(before);
        out.push_str(chosen.get(name).ok_or_else(|| format!("there is no variable ${name} in {text}"))?);
        rest = behind;
    }
    out.push_str(rest);
    Ok(out)
}

/// The legend of one series: every `{{label}}` replaced.
///
/// # Errors
/// If the series has no such label.
pub fn legend(format: &str, labels: &Labels) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = format;
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, behind) = after.split_once("}}").ok_or_else(|| format!("no end of {{{{ in {format}"))?;
        out.push_str(before);
        out.push_str(
            labels.get(name.trim()).ok_or_else(|| format!("{format}: no label {name} in {labels:?}"))?,
        );
        rest = behind;
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_replaced_as_grafana_does_it() {
        let one = Variable { name: "volume".into(), query: String::new(), many: false };
        let many = Variable { many: true, ..one.clone() };
        let values = ["a.b".to_owned(), "c".to_owned()];
        assert_eq!(one.choose(&values), "a.b");
        assert_eq!(many.choose(&values), "(a\\\\.b|c)");
        assert_eq!(many.choose(&values[..1]), "a\\\\.b");
        let chosen = Chosen::from([("v".into(), "x".into()), ("__i".into(), "6s".into())]);
        assert_eq!(interpolate("m{v=\"$v\"}[$__i]${v}", &chosen).unwrap(), "m{v=\"x\"}[6s]x");
        assert!(interpolate("m[$other]", &chosen).is_err());
        assert!(interpolate("m[${v", &chosen).is_err());
        assert_eq!(rate_interval(Duration::from_secs(1), Duration::from_secs(15)), "60s");
        assert_eq!(rate_interval(Duration::from_secs(120), Duration::from_secs(15)), "135s");
    }

    #[test]
    fn every_query_is_found_and_every_legend_filled() {
        let text = r#"{"title": "all", "panels": [{"title": "row", "panels": [
            {"title": "a", "targets": [{"expr": "x", "legendFormat": "{{n}} is {{ n }}"}]}]}, {"targets": [{"expr": "y"}]}]}"#;
        let queries = Dashboard::parse(text).queries();
        let found: Vec<_> = queries.iter().map(|query| (&*query.panel, &*query.expression)).collect();
        assert_eq!(found, [("a", "x"), ("all", "y")]);
        let labels = Labels::from([("n".into(), "1".into())]);
        assert_eq!(legend(&queries[0].legend, &labels).unwrap(), "1 is 1");
        assert!(legend("{{other}}", &labels).is_err());
        assert!(legend("{{n", &labels).is_err());
    }
}
