"""Tasks: model, data, loss and metric, by name or by a user's own function."""

from distbelief.tasks.alexnet import alexnet, mnist_alexnet
from distbelief.tasks.convnets import inception_v1, mnist_squeezenet, squeezenet, vgg16
from distbelief.tasks.digits import digits
from distbelief.tasks.gpt import gpt_tiny
from distbelief.tasks.gru import mnist_gru
from distbelief.tasks.inception import mnist_inception
from distbelief.tasks.local import mnist_local
from distbelief.tasks.mnist import mnist, mnist_lenet
from distbelief.tasks.registry import BUILTINS, available, resolve
from distbelief.tasks.siamese import mnist_siamese
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
    "gpt_tiny",
    "inception_v1",
    "mnist",
    "mnist_alexnet",
    "mnist_gru",
    "mnist_inception",
    "mnist_lenet",
    "mnist_local",
    "mnist_siamese",
    "resolve",
    "sparse_svm",
    "mnist_squeezenet",
    "squeezenet",
    "vgg16",
]
