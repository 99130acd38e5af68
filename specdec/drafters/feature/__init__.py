"""Drafters that continue the target's own states: EAGLE-3, P-EAGLE, MTP heads, Gemma 4 assistants, Medusa."""

from specdec.drafters.feature.assistant import AssistantModel, AssistantSpec
from specdec.drafters.feature.cache import FeatureCache, Rows
from specdec.drafters.feature.drafter import FeatureDrafter
from specdec.drafters.feature.eagle import Eagle3Model, PEagleModel
from specdec.drafters.feature.medusa import MedusaModel, MedusaSpec
from specdec.drafters.feature.model import FeatureModel, Parallel, Recurrent, States
from specdec.drafters.feature.mtp import MTPModel, MTPSpec
from specdec.drafters.feature.spec import EagleSpec

__all__ = [
    "AssistantModel",
    "AssistantSpec",
    "Eagle3Model",
    "EagleSpec",
    "FeatureCache",
    "FeatureDrafter",
    "FeatureModel",
    "MTPModel",
    "MTPSpec",
    "MedusaModel",
    "MedusaSpec",
    "PEagleModel",
    "Parallel",
    "Recurrent",
    "Rows",
    "States",
]
