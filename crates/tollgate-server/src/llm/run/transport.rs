//! Sends requests to the upstreams of a config, by the client that the gateway has too.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body_util::{BodyExt, Limited};
use tollgate_llm::executor::{Outgoing, Reply, SendError, Transport};
use tollgate_llm::{Api, LlmConfig, UpstreamKind};

use super::output::Output;
use crate::front::models::upstream::{self, Upstream};

/// How long a whole answer may take.
const TIMEOUT: Duration = Duration::from_secs(900);

/// The longest answer.
const MOST_BYTES: usize = 64 * 1024 * 1024;

/// The upstreams of a config.
pub(super) struct Providers {
    upstreams: Vec<Upstream>,
    /// The upstream of each configured model.
    models: Vec<(String, String)>,
    /// Changed with each request that is sent.
    output: Option<Arc<File>>,
}

impl Providers {
    pub(super) fn of(config: &LlmConfig) -> Result<Providers, String> {
        let upstreams = config.upstreams.iter().map(Upstream::new).collect::<Result<_, String>>()?;
        let models = config.models.iter().map(|model| (model.name.clone(), model.upstream.clone())).collect();
        Ok(Providers { upstreams, models, output: None })
    }

    /// The same, noting in the output that requests are sent.
    pub(super) fn noting(self, output: Arc<File>) -> Providers {
        Providers { output: Some(output), ..self }
    }

    /// Whether an upstream answers this.
    pub(super) fn serves(&self, api: Api, model: &str) -> Result<(), String> {
        self.upstream(api, model).map(drop)
    }

    fn upstream(&self, api: Api, model: &str) -> Result<&Upstream, String> {
        let kind = if api.is_anthropic() { UpstreamKind::Anthropic } else { UpstreamKind::OpenAi };
        let configured = self.models.iter().find(|(name, _)| name == model).map(|(_, upstream)| upstream);
        let found = self.upstreams.iter().find(|upstream| match configured {
            Some(name) => upstream.name() == name,
            None => upstream.kind() == kind,
        });
        match found {
            Some(upstream) if upstream.kind() == kind => Ok(upstream),
            Some(upstream) => {
                Err(format!("url: {model:?} is of upstream {}, which does not answer it", upstream.name()))
            }
            None => Err(format!("url: no upstream answers {}", api.path())),
        }
    }
}

impl Transport for Providers {
    async fn send(&self, outgoing: Outgoing<'_>) -> Result<Reply, SendError> {
        let upstream = self.upstream(outgoing.api, outgoing.model).map_err(SendError::NotSent)?;
        self.output.iter().for_each(|file| Output::touch(file));
        let body = Bytes::from(outgoing.body);
        let sending = async {
            let response = upstream.send(outgoing.api, None, &HeaderMap::new(), outgoing.group, body).await;
            let response = response.map_err(|error| match error {
                upstream::SendError::NotSent(why) => SendError::NotSent(why.to_string()),
                upstream::SendError::Lost(why) => SendError::Lost(why.to_string()),
            })?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, MOST_BYTES).collect().await;
            let body = body
                .map_err(|_| SendError::Lost("the answer broke off or is longer than 64 MiB".to_owned()))?;
            Ok(Reply { status: head.status.as_u16(), headers: head.headers, body: body.to_bytes().to_vec() })
        };
        match tokio::time::timeout(TIMEOUT, sending).await {
            Ok(sent) => sent,
            Err(_) => Err(SendError::Lost("the upstream did not answer in time".to_owned())),
        }
    }
}
