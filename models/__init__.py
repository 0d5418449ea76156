"""What a peer learns: parts, partial models, slices, sliced networks and learners."""

from .anatomy import Anatomy, ParameterMap, Part, dense_axes
from .associative import AssociativeLearner, AssociativeNetwork, sparse_vectors
from .averaging import average, implementers
from .discovery import discover
from .errors import ModelError
from .graph import ModelGraph, pair_name
from .initial import Start
from .layout import Layout
from .learner import Learner, Metrics, PeerCounting, Weighted
from .network import LAYER_ORDER, SlicedNetwork
from .networks import mlp
from .permuting import permute
from .ready import NETWORKS, cnn1d, lstm_classifier, resnet, small_cnn, unet, vit
from .seeds import stream
from .sgd import SgdLearner, cross_entropy, squared_error
from .slicing import Slicing

__all__ = [
    "LAYER_ORDER",
    "NETWORKS",
    "Anatomy",
    "AssociativeLearner",
    "AssociativeNetwork",
    "Layout",
    "Learner",
    "Metrics",
    "ModelError",
    "ModelGraph",
    "ParameterMap",
    "Part",
    "PeerCounting",
    "SgdLearner",
    "SlicedNetwork",
    "Slicing",
    "Start",
    "Weighted",
    "average",
    "cnn1d",
    "cross_entropy",
    "dense_axes",
    "discover",
    "implementers",
    "lstm_classifier",
    "mlp",
    "pair_name",
    "permute",
    "resnet",
    "small_cnn",
    "sparse_vectors",
    "squared_error",
    "stream",
    "unet",
    "vit",
]
