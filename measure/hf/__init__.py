"""Models of ``transformers``, observed at the same named places as the decoder."""

from .family_places import MODEL_TYPES as MODEL_TYPES
from .hf_model import HFConfig as HFConfig
from .hf_model import HFModel as HFModel
from .observed_pass import transformers_library as transformers_library
