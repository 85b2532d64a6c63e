//! The services, all served by one thread on one core, each on a port of its own.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use axum::Router;
use axum::serve::ListenerExt;
use tokio::sync::{mpsc, oneshot};

use crate::machine::{Core, pin_to, thread_cpu_time};

/// A server that runs until it is dropped.
pub(crate) struct Server {
    pub(crate) addresses: Vec<SocketAddr>,
    /// Asks the thread what it has used. A thread is asked because only it knows to the nanosecond.
    requests: mpsc::UnboundedSender<oneshot::Sender<Duration>>,
}

impl Server {
    pub(crate) fn start(core: Option<Core>, routers: Vec<Router>) -> Result<Server, String> {
        let failed = |error: std::io::Error| format!("starting the server: {error}");
        let listen = || {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?, listener))
        };
        let listeners: Vec<_> = routers.iter().map(|_| listen()).collect::<Result<_, _>>().map_err(failed)?;
        let (addresses, listeners): (Vec<SocketAddr>, Vec<TcpListener>) = listeners.into_iter().unzip();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (requests, mut asked) = mpsc::unbounded_channel::<oneshot::Sender<Duration>>();
        std::thread::spawn(move || {
            core.into_iter().for_each(pin_to);
            runtime.block_on(async move {
                for (listener, router) in listeners.into_iter().zip(routers) {
                    tokio::spawn(serve(listener, router));
                }
                while let Some(request) = asked.recv().await {
                    request.send(thread_cpu_time()).ok();
                }
            });
        });
        Ok(Server { addresses, requests })
    }

    /// What the server's thread has used so far.
    pub(crate) fn used(&self) -> Result<Duration, String> {
        let (request, answer) = oneshot::channel();
        self.requests.send(request).ok();
        answer.blocking_recv().map_err(|_| "the server has stopped".to_string())
    }
}

async fn serve(listener: TcpListener, router: Router) -> Result<(), std::io::Error> {
    let listener = tokio::net::TcpListener::from_std(listener)?.tap_io(|stream| {
        stream.set_nodelay(true).ok();
    });
    axum::serve(listener, router.into_make_service_with_connect_info::<SocketAddr>()).await
}
