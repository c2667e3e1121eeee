//! Mistakes that the simulator plants to see whether its checker finds them. Without the `mistakes` feature, which only the
//! tests turn on, there is nothing here to set and the questions are answered at compile time.

#[derive(Clone, Copy, Debug, Default)]
pub struct Mistakes {
    /// Acknowledge a change once one replica has executed it.
    #[cfg(feature = "mistakes")]
    pub ack_at_one: bool,
    /// Answer reads although they show what is not acknowledged.
    #[cfg(feature = "mistakes")]
    pub reads_not_held: bool,
}

impl Mistakes {
    #[cfg(feature = "mistakes")]
    pub(super) fn ack_at_one(self) -> bool {
        self.ack_at_one
    }

    #[cfg(feature = "mistakes")]
    pub(super) fn reads_not_held(self) -> bool {
        self.reads_not_held
    }

    #[cfg(not(feature = "mistakes"))]
    pub(super) fn ack_at_one(self) -> bool {
        false
    }

    #[cfg(not(feature = "mistakes"))]
    pub(super) fn reads_not_held(self) -> bool {
        false
    }
}
