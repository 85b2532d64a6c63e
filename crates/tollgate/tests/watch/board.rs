//! The dashboard, as far as a test looks at it. Grafana itself is not asked: what it would put in the place of its variables is
//! put there here.

use serde_json::Value;

/// What Grafana replaces, and by what when everything is chosen. The longer name first, where one begins another.
const VARIABLES: [(&str, &str); 6] = [
    ("$__rate_interval", "1m"),
    ("$__range", "5m"),
    ("$job", ".*"),
    ("$storage_mode", ".*"),
    ("$limiter", ".*"),
    ("$namespace", ".*"),
];

#[derive(Debug)]
pub(crate) struct Board {
    pub(crate) panels: Vec<Panel>,
    /// The queries behind the variables that people choose from.
    pub(crate) choices: Vec<Query>,
    /// The data source of each panel, query, variable and annotation.
    pub(crate) sources: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct Panel {
    pub(crate) id: u64,
    pub(crate) title: String,
    pub(crate) description: String,
    pub(crate) unit: String,
    pub(crate) is_row: bool,
    pub(crate) x: u64,
    pub(crate) y: u64,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) queries: Vec<Query>,
}

#[derive(Debug)]
pub(crate) struct Query {
    pub(crate) expression: String,
    /// The labels that the legend shows.
    pub(crate) labels: Vec<String>,
}

impl Board {
    pub(crate) fn read(text: &str) -> Board {
        let board: Value =
            serde_json::from_str(text).unwrap_or_else(|error| panic!("the dashboard: {error}"));
        let mut sources = Vec::new();
        gather_sources(&board, &mut sources);
        let variables = list(&board["templating"]["list"]);
        let choices = variables.iter().filter(|variable| variable["type"] == "query").map(choice).collect();
        Board { panels: list(&board["panels"]).iter().map(panel).collect(), choices, sources }
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn panel(panel: &Value) -> Panel {
    let place = |name: &str| {
        panel["gridPos"][name].as_u64().unwrap_or_else(|| panic!("{} has no {name}", panel["title"]))
    };
    Panel {
        id: panel["id"].as_u64().unwrap_or_else(|| panic!("{} has no id", panel["title"])),
        title: text(&panel["title"]),
        description: text(&panel["description"]),
        unit: text(&panel["fieldConfig"]["defaults"]["unit"]),
        is_row: panel["type"] == "row",
        x: place("x"),
        y: place("y"),
        width: place("w"),
        height: place("h"),
        queries: list(&panel["targets"]).iter().map(query).collect(),
    }
}

fn query(target: &Value) -> Query {
    let legend = text(&target["legendFormat"]);
    let labels =
        legend.split("{{").skip(1).filter_map(|rest| Some(rest.split_once("}}")?.0.trim().to_owned()));
    Query { expression: replaced(&text(&target["expr"])), labels: labels.collect() }
}

/// `label_values(selector, label)` is Grafana's own; Prometheus is asked for the same in its words.
fn choice(variable: &Value) -> Query {
    let asked = text(&variable["query"]["query"]);
    let inner = asked.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
    let Some((selector, label)) = inner.and_then(|inner| inner.rsplit_once(", ")) else {
        panic!("{} asks for {asked}", variable["name"])
    };
    let expression = replaced(&format!("count by ({label}) ({selector})"));
    Query { expression, labels: vec![label.to_owned()] }
}

fn replaced(expression: &str) -> String {
    let done = VARIABLES.iter().fold(expression.to_owned(), |text, (name, value)| text.replace(name, value));
    assert!(!done.contains('$'), "nobody knows a variable of {expression}");
    done
}

fn gather_sources(value: &Value, sources: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            if let Some(source) = fields.get("datasource") {
                sources.push(text(&source["uid"]));
            }
            fields.values().for_each(|field| gather_sources(field, sources));
        }
        Value::Array(values) => values.iter().for_each(|value| gather_sources(value, sources)),
        _ => {}
    }
}
