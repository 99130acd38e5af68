"""Drafters: each answers which tokens may follow the nodes of a frontier."""

from specdec.drafters.block import BlockContext, BlockDrafter, BlockModel, BlockSpec, LayerContext
from specdec.drafters.checkpoints import Inspection, Note, from_pretrained, inspect, save_pretrained
from specdec.drafters.combined import CombinedDrafter
from specdec.drafters.draft_model import ModelDrafter
from specdec.drafters.feature import (
    AssistantModel,
    AssistantSpec,
    Eagle3Model,
    EagleSpec,
    FeatureCache,
    FeatureDrafter,
    FeatureModel,
    MedusaModel,
    MedusaSpec,
    MTPModel,
    MTPSpec,
    Parallel,
    PEagleModel,
    Recurrent,
    Rows,
    States,
)
from specdec.drafters.hit_rate import HitRate
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.drafters.rope import Rope
from specdec.drafters.shortlist import Shortlist
from specdec.drafters.suffix import SuffixDrafter
from specdec.drafters.suffix_store import SuffixStore
from specdec.drafters.vocabulary import VocabularyMap

__all__ = [
    "AssistantModel",
    "AssistantSpec",
    "BlockContext",
    "BlockDrafter",
    "BlockModel",
    "BlockSpec",
    "CombinedDrafter",
    "Eagle3Model",
    "EagleSpec",
    "FeatureCache",
    "FeatureDrafter",
    "FeatureModel",
    "HitRate",
    "Inspection",
    "LayerContext",
    "MTPModel",
    "MTPSpec",
    "MedusaModel",
    "MedusaSpec",
    "ModelDrafter",
    "Note",
    "PEagleModel",
    "Parallel",
    "PromptLookupDrafter",
    "Recurrent",
    "Rope",
    "Rows",
    "Shortlist",
    "States",
    "SuffixDrafter",
    "SuffixStore",
    "VocabularyMap",
    "from_pretrained",
    "inspect",
    "save_pretrained",
]
