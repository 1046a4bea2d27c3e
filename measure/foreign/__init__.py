"""Models of ``transformers``, observed at the same named places as the decoder."""

from .family_places import MODEL_TYPES as MODEL_TYPES
from .foreign_model import ForeignConfig as ForeignConfig
from .foreign_model import ForeignModel as ForeignModel
