//! The library as its users meet it: public calls only, on a clock that is moved by hand.

#[path = "library/ad_hoc.rs"]
mod ad_hoc;
#[path = "library/charge.rs"]
mod charge;
#[path = "library/combinations.rs"]
mod combinations;
#[path = "library/crowd.rs"]
mod crowd;
#[path = "library/denials.rs"]
mod denials;
#[path = "library/fallback.rs"]
mod fallback;
#[path = "library/faulty_store.rs"]
mod faulty_store;
#[path = "library/hostile.rs"]
mod hostile;
#[path = "library/ids.rs"]
mod ids;
#[path = "library/in_flight.rs"]
mod in_flight;
#[path = "library/observe.rs"]
mod observe;
#[path = "library/outage.rs"]
mod outage;
#[path = "library/refund.rs"]
mod refund;
#[path = "library/registry.rs"]
mod registry;
#[path = "library/reload.rs"]
mod reload;
#[path = "library/remote.rs"]
mod remote;
#[path = "library/reserve.rs"]
mod reserve;
#[path = "library/scene.rs"]
mod scene;
#[path = "library/wait.rs"]
mod wait;
