from horoclone.runner import *
