//! NBD as a server speaks it, as pure state machines.
