//! Stands in for `trace` where it is compiled out (without the cargo feature `trace`): nothing is stamped, nothing is slow.

use std::cell::Ref;

use newel_protocol::JobId;
use newel_protocol::wire::StageTimes;

use super::Core;
use super::api::{ReplicaId, Time};
use super::config::{Limits, TraceConfig};
use super::stages::Stages;
use super::status::TraceStatus;
use super::timeline::{Record, What};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot;

impl Slot {
    pub(super) const NONE: Self = Self;
}

#[derive(Debug)]
pub(super) struct Tracer;

impl Tracer {
    pub(super) fn new(_: &TraceConfig, _: &Limits, _: Time) -> Self {
        Self
    }

    pub(super) fn sent(&mut self, _: Slot, _: Time, _: ReplicaId, _: bool) {}
    pub(super) fn replied(&mut self, _: Slot, _: Time, _: ReplicaId, _: StageTimes, _: bool) {}
    pub(super) fn cancelled(&mut self, _: Slot, _: Time, _: ReplicaId) {}
    pub(super) fn lost(&mut self, _: Slot, _: Time, _: ReplicaId) {}
    pub(super) fn mark(&mut self, _: Slot, _: Time, _: What, _: ReplicaId) {}
    pub(super) fn mark_open(&mut self, _: Time, _: What) {}
    pub(super) fn renumbered(&mut self, _: Slot, _: Time, _: JobId) {}
    pub(super) fn answered(&mut self, _: Slot) {}
    pub(super) fn settled(&mut self, _: Slot, _: Time, _: bool) {}

    pub(super) fn status(&self) -> TraceStatus {
        TraceStatus::default()
    }
}

impl Core {
    pub(super) fn begin_trace(&mut self, _: JobId) {}
    pub(super) fn end_trace(&mut self, _: Slot) {}
    pub(super) fn sweep_slow(&mut self) {}

    pub(super) fn trace_deadline(&self) -> Option<Time> {
        None
    }

    pub fn slow_records(&self, _: Time) -> Vec<Record> {
        Vec::new()
    }

    pub fn in_flight_records(&self, _: Time) -> Vec<Record> {
        Vec::new()
    }

    pub fn stages(&self) -> Option<Ref<'_, Stages>> {
        None
    }

    pub(super) fn trace_is_sound(&self) -> bool {
        true
    }
}
