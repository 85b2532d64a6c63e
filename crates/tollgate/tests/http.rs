//! The tower layer, called without a network: what is charged to whom, what is answered, and what is corrected afterwards.
//!
//! Everything runs twice where the store could matter: on the memory of this process, where all is decided at once, and on a
//! store that is asked, where it is not.

#[path = "http/scene.rs"]
mod scene;

#[path = "http/after.rs"]
mod after;
#[path = "http/answers.rs"]
mod answers;
#[path = "http/building.rs"]
mod building;
#[path = "http/delay.rs"]
mod delay;
#[path = "http/fast_path.rs"]
mod fast_path;
#[path = "http/keys.rs"]
mod keys;
#[path = "http/reload.rs"]
mod reload;
#[path = "http/routes.rs"]
mod routes;
