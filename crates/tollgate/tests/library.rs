//! The library as its users meet it: public calls only, on a clock that is moved by hand.

#[path = "library/charge.rs"]
mod charge;
#[path = "library/crowd.rs"]
mod crowd;
#[path = "library/hostile.rs"]
mod hostile;
#[path = "library/observe.rs"]
mod observe;
#[path = "library/registry.rs"]
mod registry;
#[path = "library/remote.rs"]
mod remote;
#[path = "library/reserve.rs"]
mod reserve;
#[path = "library/scene.rs"]
mod scene;
#[path = "library/wait.rs"]
mod wait;
