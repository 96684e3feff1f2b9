"""Tasks: model, data, loss and metric, by name or by a user's own function."""

from distbelief.tasks.alexnet import alexnet
from distbelief.tasks.convnets import inception_v1, squeezenet, vgg16
from distbelief.tasks.digits import digits
from distbelief.tasks.mnist import mnist, mnist_lenet
from distbelief.tasks.registry import BUILTINS, available, resolve
from distbelief.tasks.svm import dense_svm, sparse_svm
from distbelief.tasks.task import Data, Task, TensorData, as_data

__all__ = [
    "BUILTINS",
    "Data",
    "Task",
    "TensorData",
    "alexnet",
    "as_data",
    "available",
    "dense_svm",
    "digits",
    "inception_v1",
    "mnist",
    "mnist_lenet",
    "resolve",
    "sparse_svm",
    "squeezenet",
    "vgg16",
]
