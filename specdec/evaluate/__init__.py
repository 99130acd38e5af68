"""What drafting would have been worth: rounds recorded once, and replayed offline at other settings."""

from specdec.evaluate.recorder import Recorder
from specdec.evaluate.recording import Answer, RecordedRequest, RecordedRound, Recording
from specdec.evaluate.replaying import Replay, replay

__all__ = ["Answer", "RecordedRequest", "RecordedRound", "Recorder", "Recording", "Replay", "replay"]
