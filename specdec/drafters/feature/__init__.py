"""Drafters that continue the target's own states: EAGLE-3, P-EAGLE, MTP heads and Medusa."""

from specdec.drafters.feature.cache import FeatureCache, Rows
from specdec.drafters.feature.drafter import FeatureDrafter
from specdec.drafters.feature.eagle import EagleModel
from specdec.drafters.feature.model import FeatureModel, States
from specdec.drafters.feature.spec import EagleSpec

__all__ = ["EagleModel", "EagleSpec", "FeatureCache", "FeatureDrafter", "FeatureModel", "Rows", "States"]
